"""Run the program ``ampwise`` with ``python -m ampwise``."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the current folder first on sys.path, so the next import could run a json.py in it. Use the
    # folder of the interpreter instead, as the installed program `ampwise` does.
    sys.path[0] = os.path.dirname(sys.executable) or sys.prefix  # noqa: PTH120

from ampwise.cli import script

if __name__ == "__main__":
    script()
