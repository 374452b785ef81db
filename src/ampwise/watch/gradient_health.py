"""Statistics of one optimizer's gradients, losses and loss scale, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import FLUSHED, Underflow, scale_exponent, underflow
from ampwise.numbers.formats import find_scalar_format
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.watch.spikes import SpikeDetector
from ampwise.watch.streaks import BadStep, Streak, Streaks

__all__ = ["SEARCH", "BadStep", "GradientHealth", "Oscillation", "Series", "UpdateCounts"]

SEARCH = 50  # initial steps in which a scaler searches its scale: 2**24 down to 1 and back takes half of them
WINDOW = 200  # recent steps that rules about the scale examine
RECENT_SAMPLES = 8
RECENT_UPDATES = 8
AT_LEAST = 40  # steps after the search that a fraction needs
GROWTHS = 5  # undone growths that make a pattern
UNDONE = 0.8  # of the growths
SOON = 2  # steps within which a skip undoes a growth
OFTEN = 0.05  # of all steps skipped: more than the design costs with any growth interval of 20 or more
BEYOND_DESIGN = 4  # times one skip per interval
NOTICEABLE = 0.01  # of all steps: less is negligible
HEADROOM = 2  # doublings kept free above the largest gradient: the next one may be four times as large
HIGH = 0.95  # of the samples' largest gradients, the one to leave headroom for, so that one outlier does not decide


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """Number of weights with a nonzero gradient, and how many of them an update changed."""

    moved: int
    tried: int


@dataclass(frozen=True, slots=True)
class Oscillation:
    """The loss scale repeatedly grows, overflows immediately and falls."""

    growths: int
    undone: int
    skipped: float  # fraction of steps


class Series:
    """Values by step, in bounded memory: all recent ones, and of the older ones every n-th, with n doubled when needed.

    >>> series = Series(recent=2, old=4)
    >>> for step in range(20):
    ...     series.add(step, step / 2)
    >>> series.points
    [(0, 0.0), (8, 4.0), (16, 8.0), (18, 9.0), (19, 9.5)]
    >>> series.even
    [(0, 0.0), (8, 4.0), (16, 8.0)]
    """

    def __init__(self, *, recent: int = 24, old: int = 32) -> None:
        self.recent: deque[tuple[int, float]] = deque(maxlen=recent)  # step, value
        self._old: list[tuple[int, float]] = []
        self._old_limit = old
        self._every = 1
        self._passed = 0  # values that are no longer recent

    def add(self, step: int, value: float) -> None:
        if len(self.recent) == self.recent.maxlen:
            if self._passed % self._every == 0:
                self._old.append(self.recent[0])
            self._passed += 1
            if len(self._old) > self._old_limit:
                self._old, self._every = self._old[::2], 2 * self._every
        self.recent.append((step, value))

    @property
    def points(self) -> list[tuple[int, float]]:
        """All values kept, oldest first."""
        return [*self._old, *self.recent]

    @property
    def even(self) -> list[tuple[int, float]]:
        """Values of the whole run at even distances, oldest first."""
        skipped = -self._passed % self._every  # recent values until the next that will be kept
        return [*self._old, *list(self.recent)[skipped :: self._every]]


class GradientHealth:
    """State that the rules about gradients examine.

    precision: of the training forward passes, "fp16", "bf16" or "fp32". names: the parameters in forward order, if
    known. The other arguments are the scaler's settings. All of them may be set later.
    """

    def __init__(
        self,
        optimizer: int = 0,
        *,
        precision: str = "fp32",
        names: Sequence[str] = (),
        growth_interval: int | None = None,
        backoff_factor: float | None = None,
    ) -> None:
        self.optimizer, self.precision, self.names = optimizer, precision, names
        self.growth_interval, self.backoff_factor = growth_interval, backoff_factor
        # Steps
        self.steps = 0
        self.last_step: int | None = None
        self.lr: float | None = None
        self.first_scale: float | None = None
        self.scale: float | None = None  # at the last step
        self.settled_scale: float | None = None  # at the end of the initial search, or so far
        self.search_skips = 0
        self.window: deque[StepRow] = deque(maxlen=WINDOW)  # after the search
        self.norms = Series(recent=48, old=64)  # finite norms, unscaled
        self.losses = SpikeDetector()
        self.streaks = Streaks()
        # Samples
        self.samples = 0
        self.recent: deque[LayerSample] = deque(maxlen=RECENT_SAMPLES)
        self.values: dict[str, int] = {}  # in all samples
        self.zeros: dict[str, int] = {}
        self._merged: dict[str, Census] = {}
        self._merged_at = 0
        self.underflows: dict[str, Underflow] = {}  # of the last sample
        self.margins: dict[str, Series] = {}  # doublings from what FP16 flushes up to the median
        self.amaxes = Series()  # log2 of the largest gradient
        # Updates
        self.updates: deque[Mapping[str, UpdateCounts]] = deque(maxlen=RECENT_UPDATES)

    def add_step(self, row: StepRow) -> None:
        """Add a step; call for every step, in order."""
        self.steps += 1
        self.last_step, self.lr = row.step, row.lr
        if self.first_scale is None:
            self.first_scale = row.scale
        self.scale = row.scale
        if self.steps <= SEARCH:
            self.settled_scale = row.scale
            self.search_skips += row.skipped
        else:
            self.window.append(row)
        if row.skipped or not row.finite:
            self.streaks.add_bad(row.step, row.loss, row.scale)
        else:
            self.streaks.add_good(row.step, row.scale, row.norm)
            if row.norm is not None:
                self.norms.add(row.step, row.norm)
        if row.loss is not None and math.isfinite(row.loss):
            self.losses.add(row.step, row.loss)

    def add_sample(self, sample: LayerSample) -> None:
        """Add a sample, taken every n-th step: an unscaled census for each parameter."""
        self.samples += 1
        self.recent.append(sample)
        for name, census in sample.layers.items():
            self.values[name] = self.values.get(name, 0) + census.count
            self.zeros[name] = self.zeros.get(name, 0) + census.zeros
            if census.finite:  # in any precision, which may become known later
                self.underflows[name] = found = underflow(census, sample.scale)
                if found.nonzero:
                    margin = _margin(census, found, scale_exponent(sample.scale))
                    self.margins.setdefault(name, Series()).add(sample.last, margin)
        amax = max((census.amax for census in sample.layers.values() if census.finite), default=0.0)
        if amax:
            self.amaxes.add(sample.last, math.log2(amax))

    def add_updates(self, step: int, shares: Mapping[str, UpdateCounts]) -> None:
        """Add what a step's update changed; steps with a learning rate of zero are ignored."""
        if self.last_step != step or self.lr != 0:
            self.updates.append(shares)

    def add_bad(self, bad: BadStep) -> None:
        """Add the details of a bad step; before or after its row."""
        self.streaks.add_details(bad)

    @property
    def recent_layers(self) -> Mapping[str, Census]:
        """The last few samples merged, without gradients that were not finite."""
        if self._merged_at != self.samples:  # several rules use it
            self._merged, self._merged_at = {}, self.samples
            for sample in self.recent:
                for name, census in sample.layers.items():
                    if census.finite:
                        self._merged[name] = self._merged.get(name, Census()) + census
        return self._merged

    def real_streaks(self) -> list[Streak]:
        """Return the streaks of bad steps that a lower scale does not fix."""
        return [streak for streak in self.streaks.all if streak.is_real(self.precision)]

    @property
    def skip_share(self) -> float | None:
        """Fraction of recent steps that were skipped; None while there are too few after the scale search."""
        skips = sum(row.skipped for row in self.window)
        return skips / len(self.window) if len(self.window) >= AT_LEAST else None

    def oscillation(self) -> Oscillation | None:
        """Return the oscillation of the scale, if skips undo growths far more often than by design."""
        share, rows = self.skip_share, list(self.window)
        if share is None or share < NOTICEABLE:
            return None
        growths = [
            at
            for at, (before, after) in enumerate(pairwise(rows), start=1)
            if before.scale is not None and after.scale is not None and after.scale > before.scale
        ]
        undone = sum(any(row.skipped for row in rows[at : at + SOON]) for at in growths)
        if undone < GROWTHS or undone < UNDONE * len(growths):
            return None
        beyond = share * (self.growth_interval or 0) > BEYOND_DESIGN  # one skip per interval is by design
        return Oscillation(len(growths), undone, share) if share > OFTEN or beyond else None

    def fitting_scale(self) -> float | None:
        """Return the loss scale, a power of two, that suits the gradients of recent samples best; None without samples.

        It leaves headroom above the large gradients of the whole run.
        """
        total = sum(self.recent_layers.values(), start=Census())
        highs = sorted(amax for _, amax in self.amaxes.points)
        if not total.nonzeros or not highs:
            return None
        large = highs[math.ceil(HIGH * len(highs)) - 1]
        highest = math.floor(math.log2(find_scalar_format("fp16").max) - large) - HEADROOM
        return math.ldexp(1.0, min(total.best_scale("fp16", headroom=HEADROOM), highest))


def _margin(census: Census, found: Underflow, k: int) -> float:
    """Return how many doublings the median, lost values included, is above what FP16 flushes; interpolated."""
    half, below = found.values / 2, found.lost
    for exponent, count in sorted(census.binades.items()):
        if below + count >= half:
            return max(0.0, exponent + k - FLUSHED + max(0.0, half - below) / count)
        below += count
    return 0.0
