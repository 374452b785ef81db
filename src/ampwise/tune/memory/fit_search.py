"""Find what would make a step fit a device: more ranks, or another batch size."""

from __future__ import annotations

from ampwise.train.precision.precision import TrainPrecision
from ampwise.tune.memory.batch_scaling import fit_affine, largest_fitting
from ampwise.tune.memory.peak import Fit
from ampwise.tune.memory.ranks import Fsdp
from ampwise.tune.memory.setup import RankStep, TrainingSetup

__all__ = ["fewest_ranks", "largest_batch"]

MOST_RANKS = 1024
MOST_ROWS = 2**30
MOST_ROWS_RUN = 2**12  # if each size has to be simulated


def fewest_ranks(setup: TrainingSetup, precision: TrainPrecision, batch: int | None, available: int) -> int | None:
    """Return the fewest FSDP ranks, a power of two, on which a step fits the available bytes; None if none does."""
    ranks = 2
    while ranks <= MOST_RANKS:
        if setup.step(precision, batch, fsdp=Fsdp(ranks=ranks)).fit(available) is Fit.YES:
            return ranks
        ranks *= 2
    return None


def largest_batch(setup: TrainingSetup, precision: TrainPrecision, rows: int, available: int) -> int:
    """Return the largest batch with which a step fits the available bytes, to 1%, extrapolated from steps of two sizes.

    The fit may be tight. The extrapolated size is then simulated; if it does not fit, or the two steps differ, sizes
    are tried one by one.
    """

    def fits(size: int) -> bool:
        return setup.step(precision, size).fit(available) is not Fit.NO

    # With a single row, dimensions of one change which operations copy: two and three rows are more typical.
    sizes = (rows, 2 * rows) if rows > 1 else (2, 3)
    first, second = (setup.whole(precision, size) for size in sizes)
    line = fit_affine(first, second, batches=sizes)
    if line is None:
        return largest_fitting(fits, MOST_ROWS_RUN, rows)

    def extrapolated(size: int) -> RankStep:
        return setup.shared(line.at(size), precision)

    top = largest_fitting(lambda size: extrapolated(size).lowest <= available, MOST_ROWS, rows)
    # A batch may pack better than a smaller one: search from above for the first that fits.
    below = range(top, 0, -max(1, top // 100))
    found = next((size for size in below if extrapolated(size).fit(available) is not Fit.NO), 0)
    return found if found == 0 or fits(found) else largest_fitting(fits, found - 1, found - 1)
