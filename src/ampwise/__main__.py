"""``python -m ampwise`` is the command ``ampwise``."""

from ampwise.cli import script

if __name__ == "__main__":
    script()
