"""``python -m ampwise`` is the command ``ampwise``."""

import sys

from ampwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
