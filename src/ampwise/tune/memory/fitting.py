"""What would make a step fit a device: more ranks, or another size of batch."""

from __future__ import annotations

from ampwise.engine.precision.precision import Precision
from ampwise.tune.memory.case import Case, Step
from ampwise.tune.memory.peak import Fit
from ampwise.tune.memory.ranks import Fsdp
from ampwise.tune.memory.scaling import affine, largest

__all__ = ["fewest_ranks", "largest_batch"]

MOST_RANKS = 1024
MOST_ROWS = 2**30
MOST_ROWS_RUN = 2**12  # where each size has to be run


def fewest_ranks(case: Case, precision: Precision, batch: int | None, room: int) -> int | None:
    """The fewest ranks of FSDP, of powers of two, on which a step fits so many bytes; None if none will do."""
    ranks = 2
    while ranks <= MOST_RANKS:
        if case.step(precision, batch, fsdp=Fsdp(ranks=ranks)).fit(room) is Fit.YES:
            return ranks
        ranks *= 2
    return None


def largest_batch(case: Case, precision: Precision, rows: int, room: int) -> int:
    """The most rows with which a step fits so many bytes, to a hundredth, by what steps of two sizes tell about all.

    It may be a tight fit. What they tell is then run; where it does not hold, or they do not tell, sizes are tried.
    """

    def fits(size: int) -> bool:
        return case.step(precision, size).fit(room) is not Fit.NO

    # With a single row, dimensions of one change which operations copy: two and three tell more.
    sizes = (rows, 2 * rows) if rows > 1 else (2, 3)
    first, second = (case.whole(precision, size) for size in sizes)
    line = affine(first, second, batches=sizes)
    if line is None:
        return largest(fits, MOST_ROWS_RUN, rows)

    def told(size: int) -> Step:
        return case.shared(line.at(size), precision)

    top = largest(lambda size: told(size).lowest <= room, MOST_ROWS, rows)
    # How a batch is cut up may be luckier than a smaller one is: from above, the first that fits.
    below = range(top, 0, -max(1, top // 100))
    found = next((size for size in below if told(size).fit(room) is not Fit.NO), 0)
    return found if found == 0 or fits(found) else largest(fits, found - 1, found - 1)
