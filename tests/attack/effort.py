"""How hard the attacks try: a few rounds in ``make test``, many in ``make attack``, which sets AMPWISE_ATTACK."""

import os

FULL = "AMPWISE_ATTACK" in os.environ


def rounds(short, full):
    """The number of rounds for this run."""
    return full if FULL else short
