"""Compare the numbers of two runs, and judge whether a difference is more than noise."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from ampwise.numbers.census.underflow import NO_UNDERFLOW
from ampwise.report.curves import by_optimizer
from ampwise.report.formatting import format_bytes, format_duration, format_percent, format_scale, read_number
from ampwise.report.layers import LayerGradients
from ampwise.report.run_facts import TIMING_NAMES, as_mapping, mapping, optimizer_names, skip_rate, steps_of
from ampwise.runs.reader import Run
from ampwise.runs.rows import NumberStats, StepBucket

UNCLEAR = "no clear difference"
TOO_FEW = "too few steps to tell"
# The noise within each run's loss does not show how far another seed would be off.
SEED_WARNING = (
    "A different seed alone can also make a difference: before you trust a small one, repeat both runs with other "
    "seeds."
)
END_SHARE = 0.05  # share of the steps that both runs have that counts as their end
FEWEST_END_STEPS = 10  # steps; with fewer, the noise of a loss cannot be estimated
BLOCKS = 10  # parts of a range of steps, whose means show the noise of a smoothed loss
FEWEST_BLOCKS = 3
CLEAR_FACTOR = 2.0  # times the noise of both losses: 1 in 70 pairs of seeds lies further apart; at 1.0, 1 in 3
MOST_OPTIMIZERS = 6
FACTOR = 10.0  # from here on a change reads "×12" instead of "+1,100%"

Part = TypeVar("Part")


class NumberInfo(NamedTuple):
    """Description of a number: its name, unit and meaning, and whether "lower", "higher" or neither is better."""

    name: str
    unit: str
    better: str
    meaning: str
    relative_noise: float = 0.0  # a difference up to this share of the number is noise
    absolute_noise: float = 0.0  # a difference up to this is noise


NUMBERS = {
    "steps": NumberInfo("steps", "count", "", "of the optimizer that took the most, including skipped ones"),
    "loss_at_end": NumberInfo("loss at the end", "", "lower", "mean over {stretch}, the last that both runs have"),
    "lowest_loss": NumberInfo("lowest loss", "", "lower", "of a single step, among the steps that both runs have"),
    "losses_not_finite": NumberInfo(
        "losses not finite", "count", "lower", "inf or NaN, in the steps that both runs have, of all optimizers"
    ),
    "losses_not_finite_in_all": NumberInfo(
        "losses not finite, whole run", "count", "", "inf or NaN, in all steps of all optimizers"
    ),
    "skipped": NumberInfo("skipped steps, whole run", "count", "", "of all optimizers"),
    "skip_rate": NumberInfo(
        "skip rate, common steps",
        "share",
        "lower",
        "share of skipped steps of all optimizers, in the steps that both runs have",
    ),
    "median_norm": NumberInfo("median gradient norm", "", "", "before clipping, over the steps that both runs have"),
    "last_scale": NumberInfo("last loss scale", "scale", "", "loss scale at the end of the run"),
    "worst_lost": NumberInfo(
        "lost in FP16, worst layer", "share", "lower", "share of gradients flushed to zero, at least", 0.0, 0.005
    ),
    "lost": NumberInfo(
        "lost in FP16, all layers", "share", "lower", "share of all gradients flushed to zero, at least", 0.0, 0.005
    ),
    "seconds_per_step": NumberInfo(
        TIMING_NAMES["seconds_per_step"], "seconds", "lower", "wall time, without the first steps", 0.05
    ),
    "half_share": NumberInfo(
        TIMING_NAMES["half_share"], "share", "higher", "of the work of matmuls, in 16 bits or fewer", 0.0, 0.01
    ),
    "cast_share": NumberInfo(
        TIMING_NAMES["cast_share"],
        "share",
        "lower",
        "of the device's time, for conversions between precisions",
        0.0,
        0.01,
    ),
    "data_wait_share": NumberInfo(
        TIMING_NAMES["data_wait_share"], "share", "lower", "of the wall time, in the DataLoader", 0.0, 0.02
    ),
    "syncs_per_step": NumberInfo(
        TIMING_NAMES["syncs_per_step"], "", "lower", "how often the host waits for the device", 0.0, 0.1
    ),
    "peak_memory": NumberInfo(
        "peak memory, device", "bytes", "lower", "allocated by torch, on the fullest device", 0.01
    ),
    "host_peak": NumberInfo("peak memory, host", "bytes", "lower", "of the process, resident", 0.05),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedNumber:
    """A number of both runs; None where it is unknown. A difference of up to ``chance`` is noise.

    ``chance`` is None if the noise of the number cannot be estimated.
    """

    key: str
    name: str
    unit: str = ""
    better: str = ""
    meaning: str = ""
    before: float | None = None
    after: float | None = None
    chance: float | None = 0.0
    owner: str = ""  # the optimizer, if there are several

    @property
    def judged(self) -> str:
        """Verdict "better", "worse", "same", UNCLEAR or TOO_FEW; empty if the number should not be judged."""
        old, new = self.before, self.after
        if old is None or new is None:
            return ""
        if old == new or (math.isnan(old) and math.isnan(new)):
            return "same"
        if not self.better:
            return ""
        if not math.isfinite(old) and not math.isfinite(new):
            return ""
        if not (math.isfinite(old) and math.isfinite(new)):
            return "better" if math.isfinite(new) else "worse"
        if self.chance is None:
            return TOO_FEW
        if abs(new - old) <= self.chance:
            return UNCLEAR
        return "better" if (new < old) == (self.better == "lower") else "worse"

    @property
    def change(self) -> str:
        """Change as text: "−12%, better", "no clear difference"; empty if a run does not have the number."""
        if self.before is None or self.after is None:
            return ""
        if self.judged in ("same", UNCLEAR, TOO_FEW):
            return self.judged
        old, new = self.before, self.after
        if not (math.isfinite(old) and math.isfinite(new)):
            amount = ""
        elif self.unit == "share":
            amount = _signed(100 * (new - old), " points")
        elif old <= 0 or new <= 0:
            amount = f"{new - old:+.3g}".replace("-", "−", 1)
        elif self.unit == "scale" or not 1 / FACTOR < new / old < FACTOR:
            amount = f"×{new / old:.3g}" if new / old > 1 else f"÷{old / new:.3g}"
        else:
            amount = _signed(100 * (new / old - 1), "%")
        return ", ".join(part for part in (amount, self.judged) if part)

    def written(self, value: float | None) -> str:
        """Return a value as text; a dash if it is unknown."""
        if value is None:
            return "–"
        return _UNITS[self.unit](value) if math.isfinite(value) else "NaN" if math.isnan(value) else str(value)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        parts = ("key", "name", "owner", "meaning", "unit", "better", "before", "after", "chance", "judged", "change")
        return {part: getattr(self, part) for part in parts}


def compared_numbers(
    before: Run, after: Run, layers: tuple[Sequence[LayerGradients], Sequence[LayerGradients]], *, judge: bool = True
) -> list[ComparedNumber]:
    """Return every number that at least one of the runs has. ``layers``: those of both runs, from ``layers_of``.

    judge: say which is better; numbers of two different models cannot be judged.
    """
    runs = (before, after)
    times, memories = [mapping(run, "timing") for run in runs], [mapping(run, "memory") for run in runs]
    peaks = [
        [
            peak
            for device in as_mapping(memory.get("devices")).values()
            if (peak := read_number(as_mapping(device).get("peak_allocated"))) is not None
        ]
        for memory in memories
    ]
    lost = [[layer.underflow for layer in some if layer.underflow is not None] for some in layers]
    found = [
        _number("steps", (float(steps_of(run)) for run in runs)),
        *_over_steps(before, after),
        *_skips(before, after),
        _number("worst_lost", (max((one.lost_share for one in some), default=None) for some in lost)),
        _number("lost", (sum(some, start=NO_UNDERFLOW).lost_share if some else None for some in lost)),
    ]
    for key in TIMING_NAMES:
        # The record shows the noise only of the time per step.
        chance = _clear([_time_noise(run) for run in runs]) if key == "seconds_per_step" else 0.0
        found.append(_number(key, (read_number(time.get(key)) for time in times), chance=chance))
    found += [
        _number("peak_memory", (max(some, default=None) for some in peaks)),
        _number("host_peak", (read_number(memory.get("host_peak")) for memory in memories)),
    ]
    known = [one for one in found if one.before is not None or one.after is not None]
    return known if judge else [replace(one, better="") for one in known]


def steps_in_common(before: Run, after: Run) -> int:
    """Return the last step that both runs reached, of the first optimizer that both have; 0 if there is none."""
    return next((stretch.last for _, stretch, *_ in _shared_lines(before, after)), 0)


def _number(
    key: str, values: Iterable[float | None], *, chance: float | None = 0.0, owner: str = "", at: str = ""
) -> ComparedNumber:
    about = NUMBERS[key]
    before, after = values
    larger = max((abs(value) for value in (before, after) if value is not None and math.isfinite(value)), default=0.0)
    return ComparedNumber(
        key=key,
        name=f"{about.name} ({owner})" if owner else about.name,
        unit=about.unit,
        better=about.better,
        meaning=about.meaning.format(stretch=at),
        before=before,
        after=after,
        chance=None if chance is None else max(chance, about.relative_noise * larger, about.absolute_noise),
        owner=owner,
    )


# --- over steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StepRange:
    """The last range of steps that two runs have in common."""

    first: int
    last: int

    @classmethod
    def ending(cls, last: int) -> _StepRange:
        length = max(math.ceil(last * END_SHARE), FEWEST_END_STEPS)
        return cls(max(1, last - length + 1), last)

    def __str__(self) -> str:
        return f"step {self.last:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"

    def holds(self, bucket: StepBucket) -> bool:
        """Return whether a bucket lies in the range; a bucket of merged steps counts by its middle."""
        return self.first <= (bucket.first + bucket.last) / 2 <= self.last


def _shared_lines(before: Run, after: Run) -> Iterator[tuple[int, _StepRange, list[StepBucket], list[StepBucket]]]:
    """Yield, for each optimizer that both runs have, the last shared range of steps and both runs' steps up to it."""
    old, new = by_optimizer(before.steps), by_optimizer(after.steps)
    for optimizer in sorted(old.keys() & new.keys())[:MOST_OPTIMIZERS]:
        lines = old[optimizer], new[optimizer]
        last = min(max(bucket.last for bucket in line) for line in lines)
        shared = [[bucket for bucket in line if bucket.first <= last] for line in lines]
        yield optimizer, _StepRange.ending(last), shared[0], shared[1]


def _over_steps(before: Run, after: Run) -> Iterator[ComparedNumber]:
    several = len({bucket.optimizer for run in (before, after) for bucket in run.steps}) > 1
    names = optimizer_names(after)
    for optimizer, stretch, *shared in _shared_lines(before, after):
        owner = names.get(optimizer, f"optimizer {optimizer}") if several else ""
        ends = [_end(line, stretch) for line in shared]
        chance = _clear([noise for _, noise in ends])
        yield _number("loss_at_end", (mean for mean, _ in ends), chance=chance, owner=owner, at=str(stretch))
        lows = [[bucket.loss.low for bucket in line if bucket.loss.low is not None] for line in shared]
        lowest = _number("lowest_loss", (min(some, default=None) for some in lows), chance=chance, owner=owner)
        # For a loss that diverged, its earlier minimum means nothing.
        diverged = any(mean is not None and not math.isfinite(mean) for mean, _ in ends)
        yield replace(lowest, better="") if diverged else lowest
        yield _number("median_norm", (_median(bucket.norm for bucket in line) for line in shared), owner=owner)
        rows = [run.rows(optimizer) for run in (before, after)]
        scales = [[bucket.scale.mean for bucket in line if bucket.scale.mean is not None] for line in rows]
        yield _number("last_scale", (some[-1] if some else None for some in scales), owner=owner)


def _end(line: Sequence[StepBucket], stretch: _StepRange) -> tuple[float | None, float | None]:
    """Return the mean loss over the range and its noise, from the means of tenths; None for what is unknown.

    The loss is NaN if it was not finite at some step of the range: a mean of the others would be misleading.
    """
    within = [bucket.loss for bucket in line if stretch.holds(bucket) and bucket.loss.known]
    within = within or [bucket.loss for bucket in line[-1:] if bucket.loss.known]
    if not within:
        return None, None
    total = NumberStats.over(within)
    if total.bad or total.mean is None or total.low is None or total.high is None:
        return math.nan, None
    if total.finite < FEWEST_END_STEPS:
        return total.mean, None
    means = [mean for mean in (NumberStats.over(block).mean for block in _blocks(within)) if mean is not None]
    if len(means) >= FEWEST_BLOCKS:
        return total.mean, statistics.stdev(means)
    # A few merged steps: their extremes are known, and bound the noise.
    return total.mean, total.high - total.low if total.finite >= FEWEST_BLOCKS else None


def _blocks(line: Sequence[Part]) -> list[Sequence[Part]]:
    """Split a list into at most BLOCKS parts of equal length, except the last."""
    length = math.ceil(len(line) / BLOCKS)
    return [line[start : start + length] for start in range(0, len(line), length)]


def _clear(noises: Sequence[float | None]) -> float | None:
    """Return the smallest clear difference, from the noise of both runs; None if that of one is unknown."""
    known = [one for one in noises if one is not None]
    return CLEAR_FACTOR * sum(known) if len(known) == len(noises) else None


def _median(spreads: Iterable[NumberStats]) -> float | None:
    """Return the median over steps; merged steps count as often as they occurred."""
    means = sorted((spread.mean, spread.finite) for spread in spreads if spread.mean is not None)
    half = sum(times for _, times in means) / 2
    passed = itertools.accumulate(times for _, times in means)
    return next((mean for (mean, _), so_far in zip(means, passed, strict=True) if so_far >= half), None)


def _skips(before: Run, after: Run) -> Iterator[ComparedNumber]:
    runs = (before, after)
    lines = [shared for _, _, *shared in _shared_lines(before, after)]
    both = [[bucket for shared in lines for bucket in shared[which]] for which in range(len(runs))]

    def not_finite(steps: Sequence[StepBucket]) -> float | None:
        known = any(bucket.loss.known for bucket in steps)
        return float(sum(bucket.loss.bad for bucket in steps)) if known else None

    bad, bad_in_all = [not_finite(steps) for steps in both], [not_finite(run.steps) for run in runs]
    if any(bad_in_all):
        yield _number("losses_not_finite", bad)
    if bad_in_all != bad:
        yield _number("losses_not_finite_in_all", bad_in_all)
    yield _number("skipped", (sum(bucket.skipped for bucket in run.steps) if run.steps else None for run in runs))
    taken, rates = [sum(bucket.count for bucket in steps) for steps in both], [skip_rate(steps) for steps in both]
    # Two standard deviations of the count of a rare event.
    chance = 2 * math.sqrt(sum((rate or 0.0) / max(1, of) for rate, of in zip(rates, taken, strict=True)))
    yield _number("skip_rate", rates, chance=chance)


# --- layers, time, memory ------------------------------------------------------------------------------------------


def _time_noise(run: Run) -> float | None:
    """Return the noise of the time per step, from the means of tenths of the run without the first, the warm-up."""
    line = next(iter(by_optimizer(run.steps).values()), [])
    blocks = _blocks(line) if line else []
    ends = [(block[-1].ended, block[-1].last) for block in blocks]
    means = [(to - since) / max(1, last - first) for (since, first), (to, last) in itertools.pairwise(ends)]
    return statistics.stdev(means) if len(means) >= FEWEST_BLOCKS else None


# --- text ----------------------------------------------------------------------------------------------------------


def _signed(hundredths: float, unit: str) -> str:
    magnitude = abs(hundredths)
    if magnitude < 0.05:
        return f"{'down' if hundredths < 0 else 'up'} by less than 0.1{unit}"
    digits = f"{magnitude:,.0f}" if magnitude >= 10 else f"{magnitude:.1f}"
    return f"{'−' if hundredths < 0 else '+'}{digits}{unit}"


_UNITS: Mapping[str, Callable[[float], str]] = {
    "": lambda value: f"{value:.4g}",
    "count": lambda value: f"{value:,.0f}",
    "scale": format_scale,
    "share": format_percent,
    "seconds": format_duration,
    "bytes": format_bytes,
}
