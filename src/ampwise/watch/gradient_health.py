"""Statistics of one optimizer's gradients, losses and loss scale, in bounded memory; scaler settings that suit them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ampwise.finding.call_site import CallSite
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import FLUSHED, NO_UNDERFLOW, Underflow, scale_exponent, underflow
from ampwise.numbers.formats import find_scalar_format
from ampwise.numbers.number_text import scale_text
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.watch.spikes import SpikeDetector

if TYPE_CHECKING:
    from ampwise.watch.lost_gradients import LostAt

__all__ = [
    "SEARCH",
    "BadStep",
    "GradientHealth",
    "Oscillation",
    "Series",
    "Streak",
    "Streaks",
    "UpdateCounts",
    "suggested_settings",
]

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
NEAR_FLUSHING = 2  # doublings: a median this close to what FP16 flushes, and then all zeros, was flushed

# Streaks of bad steps
LONG = 8  # skips in a row after a good step: 256 times below a scale that worked
NO_SCALING = 1.0  # at this scale and below, the unscaled gradients overflow
FALLS = 3  # of the scale that count as repeated
KEPT = 64  # streaks; ordinary ones are dropped first
KEPT_BAD = 32  # bad steps with details, at each end of the run
TRUSTED = 5  # good steps needed to know what is usual
USUAL = 20  # steps back
IMPLAUSIBLE = 2.0**10  # times the usual norm: such an overflow is not caused by the scale

# Suggested settings
COSTLY_SEARCH = 3  # steps skipped at the start that are worth mentioning
WORTH_MORE_SCALE = 0.01  # of the gradients lost, from which a higher start is advised
SEVERAL = 3  # skips per overflow, from which a faster backoff is advised
OVERFLOWS = 4  # needed to know the usual number of skips per overflow
FASTEST = 1 / 16  # backoff: a stronger one would undo too much growth
USUAL_INTERVAL = 2000  # torch's default
USUAL_BACKOFF = 0.5


def _is_bad(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    """A step whose loss or gradients were not finite."""

    step: int
    loss: float | None = None
    scale: float | None = None  # None without a scaler
    parameters: tuple[str, ...] = ()  # those whose gradients were not finite
    module: str | None = None  # first module whose output was not finite, if known
    healthy_before: bool | None = True  # the weights were finite before the step; None: unknown

    @property
    def bad_loss(self) -> bool:
        return _is_bad(self.loss)


@dataclass(slots=True, kw_only=True)
class Streak:
    """Consecutive bad steps."""

    first: int
    last: int
    count: int = 1
    first_scale: float | None = None
    lowest_scale: float | None = None
    loss: float | None = None  # at its first step
    after_good: bool = False  # good steps came before
    implausible: bool = False  # gradients were far from overflow at this scale
    bad_losses: int = 0  # steps whose loss was not finite
    last_bad_loss: int | None = None  # step
    good_losses: int = 0  # steps whose loss was finite
    last_good_loss: int | None = None  # step
    corrupted_from: int | None = None  # first step whose loss was bad too, or unknown after the weights were corrupted

    @property
    def bad_loss(self) -> bool:
        """Whether it began with a loss that was not finite."""
        return _is_bad(self.loss)

    @property
    def gradients_alone(self) -> int:
        """Steps whose gradients were not finite while the loss was, as far as known."""
        return self.count if self.corrupted_from is None else max(self.corrupted_from - self.first, 0)

    def is_real(self, precision: str) -> bool:
        """Return whether this is more than an ordinary overflow of scaled gradients, which a lower scale fixes."""
        if self.bad_loss or self.lowest_scale is None or precision == "bf16":
            return True  # the loss scale does not affect the loss; BF16 has FP32's range
        persists = self.after_good and self.count > LONG
        return self.lowest_scale <= NO_SCALING or persists or self.implausible


@dataclass(frozen=True, slots=True)
class Collapse:
    """Skipped steps through which the loss scale fell too far."""

    first: int
    last: int
    count: int  # of skipped steps from the first to the last
    first_scale: float
    lowest_scale: float
    bad_losses: int = 0  # of the skipped steps
    good_losses: int = 0  # the loss of others is not known


class Streaks:
    """Streaks of a run, built step by step; details of bad steps may come before or shortly after their rows."""

    def __init__(self) -> None:
        self.all: list[Streak] = []
        self.bad: list[BadStep] = []
        self.total = 0  # streaks, kept or not
        self.good = 0  # good steps
        self._is_open = False
        self._usual: deque[tuple[float, float]] = deque(maxlen=USUAL)  # scale, scaled norm

    @property
    def open(self) -> Streak | None:
        """Streak that has not ended, if any."""
        return self.all[-1] if self.all and self._is_open else None

    def add_good(self, step: int, scale: float | None, norm: float | None) -> None:
        if self.all and self._is_open and step <= self.all[-1].last:
            return  # the details came first and are more accurate
        self._is_open = False
        self.good += 1
        if scale is not None and norm is not None:
            self._usual.append((scale, scale * norm))

    def add_bad(self, step: int, loss: float | None, scale: float | None) -> None:
        last = self.all[-1] if self.all else None
        # A scaler skipped the steps before, so they did not cause this bad loss: a new failure.
        is_new = last is not None and _is_bad(loss) and scale is not None and not last.bad_loss
        if last is not None and step == last.last + 1 and not is_new:
            self._is_open = True
            last.last, last.count = step, last.count + 1
            if scale is not None:
                last.lowest_scale = scale if last.lowest_scale is None else min(scale, last.lowest_scale)
        elif last is None or step > last.last:
            self.all.append(
                Streak(
                    first=step,
                    last=step,
                    first_scale=scale,
                    lowest_scale=scale,
                    loss=loss,
                    after_good=self.good > 0,
                    implausible=self._is_implausible(scale),
                )
            )
            self.total += 1
            self._is_open = True
            if len(self.all) > KEPT:
                ordinary = (i for i, streak in enumerate(self.all[:-1]) if not streak.is_real("fp16"))
                del self.all[next(ordinary, KEPT // 2)]
        elif step == last.first and last.loss is None:
            last.loss = loss
        if _is_bad(loss):
            self._mark_corrupted(step, bad_loss=True)
        elif loss is not None and self.all[-1].last == step and self.all[-1].last_good_loss != step:
            self.all[-1].good_losses, self.all[-1].last_good_loss = self.all[-1].good_losses + 1, step

    def add_details(self, bad: BadStep) -> None:
        self.add_bad(bad.step, bad.loss, bad.scale)
        if bad.loss is None and bad.healthy_before is False:
            self._mark_corrupted(bad.step, bad_loss=False)
        self.bad.append(bad)
        if len(self.bad) > 2 * KEPT_BAD:
            del self.bad[KEPT_BAD]

    def details(self, streak: Streak) -> BadStep | None:
        """Return the details of its first step, or of the first one with details."""
        inside = sorted((bad for bad in self.bad if streak.first <= bad.step <= streak.last), key=lambda bad: bad.step)
        if not inside:
            return None
        # Modules may have been examined only at a later step, which is valid as long as the weights are unchanged.
        module = next((bad.module for bad in inside if bad.module and bad.healthy_before), None)
        return replace(inside[0], module=inside[0].module or module)

    def collapse(self) -> Collapse | None:
        """Return how the scale fell too far, whatever was bad about each step; None if it did not."""
        joined: list[Streak] = []
        for streak in self.all:
            if joined and streak.first == joined[-1].last + 1:
                scales = [each.lowest_scale for each in (joined[-1], streak) if each.lowest_scale is not None]
                count = joined[-1].count + streak.count
                joined[-1] = replace(
                    joined[-1],
                    last=streak.last,
                    count=count,
                    lowest_scale=min(scales, default=None),
                    bad_losses=joined[-1].bad_losses + streak.bad_losses,
                    good_losses=joined[-1].good_losses + streak.good_losses,
                )
            else:
                joined.append(streak)
        scaled = [each for each in joined if each.first_scale is not None and each.lowest_scale is not None]
        longest = max(scaled, key=lambda streak: streak.count, default=None)
        if longest is None or longest.first_scale is None or longest.lowest_scale is None:
            return None
        # An engine keeps the scale if the loss itself is bad.
        if longest.lowest_scale < longest.first_scale and longest.after_good and longest.count >= LONG:
            return Collapse(
                longest.first,
                longest.last,
                longest.count,
                longest.first_scale,
                longest.lowest_scale,
                longest.bad_losses,
                longest.good_losses,
            )
        lowest = min(each.lowest_scale for each in scaled if each.lowest_scale is not None)
        count = sum(each.count for each in scaled)
        if lowest >= NO_SCALING or count < FALLS:
            return None
        last = next(each.last for each in reversed(scaled) if each.lowest_scale == lowest)
        until = [each for each in scaled if each.last <= last]
        first_scale = max(each.first_scale or 0.0 for each in until)
        bad, good = sum(each.bad_losses for each in until), sum(each.good_losses for each in until)
        return Collapse(until[0].first, last, sum(each.count for each in until), first_scale, lowest, bad, good)

    def _mark_corrupted(self, step: int, *, bad_loss: bool) -> None:
        streak = next((each for each in reversed(self.all) if each.first <= step <= each.last), None)
        if streak is None:
            return  # not kept
        streak.corrupted_from = step if streak.corrupted_from is None else min(step, streak.corrupted_from)
        if bad_loss and (streak.last_bad_loss is None or step > streak.last_bad_loss):  # reported twice, counted once
            streak.bad_losses, streak.last_bad_loss = streak.bad_losses + 1, step

    def _is_implausible(self, scale: float | None) -> bool:
        """Whether gradients were far from overflow at this scale."""
        if scale is None or len(self._usual) < TRUSTED or scale > max(used for used, _ in self._usual):
            return False
        return max(norm for _, norm in self._usual) * IMPLAUSIBLE <= find_scalar_format("fp16").max


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
        self.reduced_in, self.ranks = "", 1  # in what FSDP2 sums gradients over ranks, if known; how many ranks
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
        self.has_rivals = False  # steps on other losses change what its losses depend on, as in a GAN
        self.streaks = Streaks()
        # Samples
        self.samples = 0
        self.recent: deque[LayerSample] = deque(maxlen=RECENT_SAMPLES)
        self.values: dict[str, int] = {}  # in all samples
        self.zeros: dict[str, int] = {}
        self.cast_at: dict[str, CallSite] = {}  # lines that made parameters 16 bits wide, as far as they are known
        self.zero_at: CallSite | None = None  # the operation whose gradient is zero, if that is known
        self.zeroed_at: CallSite | None = None  # the line that fills weights with zeros, if all of them are zero
        self.lost_at: dict[str, LostAt] = {}  # where gradients of single parameters become zero, as far as is known
        self.frozen_zero: tuple[str, CallSite] | None = None  # weights that are all zero, and where they are frozen
        self._merged: dict[str, Census] = {}
        self._merged_at = 0
        self.underflows: dict[str, Underflow] = {}  # of the last sample
        self.margins: dict[str, Series] = {}  # doublings from what FP16 flushes up to the median
        self._typical: dict[str, tuple[int, float]] = {}  # last nonzero sample: number of values, margin without scale
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

    @property
    def are_all_zero(self) -> bool:
        """Whether each gradient is exactly zero in all samples so far."""
        values = sum(self.values.values())
        return self.samples > 1 and values > 0 and values == sum(self.zeros.values())

    @property
    def dead(self) -> list[str]:
        """Parameters whose gradients are exactly zero in all samples, while others have some."""
        dead = [name for name, values in self.values.items() if values and values == self.zeros[name]]
        alive = {name for name, values in self.values.items() if values > self.zeros[name]}
        # In a bias alone the gradients cancel: before a normalisation, or in the difference of two outputs.
        dead = [name for name in dead if not name.endswith("bias") or f"{name.removesuffix('bias')}weight" not in alive]
        return dead if alive else []

    def add_sample(self, sample: LayerSample) -> None:
        """Add a sample, taken every n-th step: an unscaled census for each parameter."""
        self.samples += 1
        self.recent.append(sample)
        for name, census in sample.layers.items():
            self.values[name] = self.values.get(name, 0) + census.count
            self.zeros[name] = self.zeros.get(name, 0) + census.zeros
            if census.finite:  # in any precision, which may become known later
                self._add_underflow(name, census, sample)
        amax = max((census.amax for census in sample.layers.values() if census.finite), default=0.0)
        if amax:
            self.amaxes.add(sample.last, math.log2(amax))

    def _add_underflow(self, name: str, census: Census, sample: LayerSample) -> None:
        found, k = underflow(census, sample.scale), scale_exponent(sample.scale)
        if found.nonzero:
            margin = _margin(census, found, k)
            self.margins.setdefault(name, Series()).add(sample.last, margin)
            self._typical[name] = (found.values, margin - k)
        elif not census.nonzeros and name in self._typical:
            values, margin = self._typical[name]
            if margin + k <= NEAR_FLUSHING:  # all of it was lost since
                found = Underflow(lost=min(values, census.zeros))
        self.underflows[name] = found

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


def suggested_settings(health: GradientHealth) -> dict[str, tuple[float, str]]:
    """Return GradScaler settings that suit this run better than its own: for each its value and the reason."""
    found: dict[str, tuple[float, str]] = {}
    if health.scale is None or health.real_streaks():
        return found  # no scaler, or its settings are not the problem
    settled, first, now = health.settled_scale, health.first_scale, health.scale
    lost = sum(health.underflows.values(), start=NO_UNDERFLOW).lost_share
    fitting = health.fitting_scale() if lost >= WORTH_MORE_SCALE else None
    if settled is None or first is None:
        pass
    elif health.search_skips >= COSTLY_SEARCH and settled < first:
        fell = f"fell from {scale_text(first)} to {scale_text(settled)}"
        found["init_scale"] = settled, f"{health.search_skips} of the first steps were skipped while the scale {fell}"
    elif fitting is not None and fitting > max(first, now):
        doublings = scale_exponent(fitting) - scale_exponent(first)
        raised = f"the initial scale can be raised by {doublings} doublings from {scale_text(first)}"
        found["init_scale"] = (
            fitting,
            f"at least {lost:.0%} of the gradients are lost at {scale_text(now)}, and {raised}",
        )
    swings = health.oscillation()
    if swings and (health.growth_interval or 0) < USUAL_INTERVAL:
        undone = f"{swings.undone} of {swings.growths} increases overflowed immediately"
        found["growth_interval"] = USUAL_INTERVAL, f"{undone}, costing {swings.skipped:.0%} of steps"
    ended = [streak.count for streak in health.streaks.all if streak.after_good and streak is not health.streaks.open]
    several = int(median(ended)) if len(ended) >= OVERFLOWS else 0
    present = health.backoff_factor or USUAL_BACKOFF
    faster = max(present**several, FASTEST)
    if several >= SEVERAL and faster < present:
        reason = f"an overflow usually takes {several} skipped steps until the scale is low enough"
        found["backoff_factor"] = faster, reason
    return found
