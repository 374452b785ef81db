"""``python -m ampwise`` is the command ``ampwise``."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the current folder first, and a json.py there would be run by the next import. The command
    # `ampwise` has the folder of programs there.
    sys.path[0] = os.path.dirname(sys.executable) or sys.prefix  # noqa: PTH120

from ampwise.cli import script

if __name__ == "__main__":
    script()
