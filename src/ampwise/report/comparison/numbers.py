"""The numbers of two runs beside each other, and whether a difference is one."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ampwise.record.bucket import Bucket, Spread
from ampwise.report.curves import by_optimizer
from ampwise.report.facts import TIMES, as_mapping, mapping, optimizer_names
from ampwise.report.verdict import skip_rate, steps_of
from ampwise.report.wording import duration, number, percent, scale_words, size

if TYPE_CHECKING:
    from ampwise.record.reader import Run
    from ampwise.report.layers import Layer

__all__ = ["ANOTHER_SEED", "TOO_FEW", "UNCLEAR", "ComparedNumber", "compared_numbers", "steps_in_common"]

UNCLEAR = "no clear difference"
TOO_FEW = "too few steps to tell"
# Each run shows how far its own loss goes up and down, and not where another seed would have led it.
ANOTHER_SEED = (
    "Another seed alone can make a difference, too: before you believe a small one, run both again with other seeds."
)
STRETCH = 0.05  # of the steps that both runs have: what counts as their end
SHORTEST_STRETCH = 10  # steps; of fewer nobody can say how much a loss goes up and down
BLOCKS = 10  # of a stretch, whose means show how much a smoothed loss wanders
FEWEST_BLOCKS = 3
CLEAR = 2.0  # times what both losses wander: of pairs of seeds, 1 in 70 lies further apart; at 1.0, 1 in 3
MOST_OPTIMIZERS = 6
FACTOR = 10.0  # from here on "×12" says more than "+1,100%"

Part = TypeVar("Part")


class About(NamedTuple):
    """What a number is: in words, its unit, and whether "lower" or "higher" is better, or neither."""

    name: str
    unit: str
    better: str
    meaning: str
    of_itself: float = 0.0  # a difference up to this share of the number is chance
    at_least: float = 0.0  # and so is one up to this


NUMBERS = {
    "steps": About("steps", "count", "", "of the optimizer that took the most, skipped ones too"),
    "loss_at_end": About("loss at the end", "", "lower", "mean over {stretch}, the last that both runs have"),
    "lowest_loss": About("lowest loss", "", "lower", "of one step, among those that both runs have"),
    "losses_not_finite": About(
        "losses not finite", "count", "lower", "inf or NaN, among the steps that both runs have, of all optimizers"
    ),
    "losses_not_finite_in_all": About(
        "losses not finite, whole run", "count", "", "inf or NaN, at all steps of all optimizers"
    ),
    "skipped": About("skipped steps, whole run", "count", "", "of all optimizers"),
    "skip_rate": About(
        "skip rate", "share", "lower", "skipped of all optimizers' steps, among those that both runs have"
    ),
    "median_norm": About("median gradient norm", "", "", "before clipping, over the steps that both runs have"),
    "last_scale": About("last loss scale", "scale", "", "by which losses were multiplied at the end"),
    "worst_lost": About(
        "lost in FP16, worst layer", "share", "lower", "gradients that became zero, by estimate", at_least=0.005
    ),
    "lost": About("lost in FP16, all layers", "share", "lower", "the same over all gradients", at_least=0.005),
    "seconds_per_step": About(
        TIMES["seconds_per_step"], "seconds", "lower", "wall time, without the first steps", of_itself=0.05
    ),
    "half_share": About(
        TIMES["half_share"], "share", "higher", "of the work of matrix products, in 16 bits or fewer", at_least=0.01
    ),
    "cast_share": About(
        TIMES["cast_share"], "share", "lower", "of the device's time, changing precision only", at_least=0.01
    ),
    "data_wait_share": About(
        TIMES["data_wait_share"], "share", "lower", "of the wall time, in the DataLoader", at_least=0.02
    ),
    "syncs_per_step": About(
        TIMES["syncs_per_step"], "", "lower", "how often the host stands still for the device", at_least=0.1
    ),
    "peak_memory": About(
        "peak memory, device", "bytes", "lower", "allocated by torch, on the fullest device", of_itself=0.01
    ),
    "host_peak": About("peak memory, host", "bytes", "lower", "of the process, resident", of_itself=0.05),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedNumber:
    """A number of both runs; None where it is not known. ``chance``: a difference up to it says nothing.

    ``chance`` is None where nobody can say how much the number goes up and down by itself.
    """

    key: str
    name: str
    unit: str = ""
    better: str = ""
    meaning: str = ""
    before: float | None = None
    after: float | None = None
    chance: float | None = 0.0
    owner: str = ""  # the optimizer, of several

    @property
    def judged(self) -> str:
        """ "better", "worse", "same", that there is no clear difference; empty where nobody should judge."""
        old, new = self.before, self.after
        if old is None or new is None:
            return ""
        if old == new or (math.isnan(old) and math.isnan(new)):
            return "same"
        if not self.better:
            return ""
        if not (math.isfinite(old) and math.isfinite(new)):
            return _of_finite(old, new)
        if self.chance is None:
            return TOO_FEW
        if abs(new - old) <= self.chance:
            return UNCLEAR
        return "better" if (new < old) == (self.better == "lower") else "worse"

    @property
    def change(self) -> str:
        """In words: "−12%, better", "no clear difference"; empty where a run does not know the number."""
        if self.before is None or self.after is None:
            return ""
        if self.judged in ("same", UNCLEAR, TOO_FEW):
            return self.judged
        return ", ".join(part for part in (_amount(self.before, self.after, self.unit), self.judged) if part)

    def written(self, value: float | None) -> str:
        """As a person reads it; a dash for what is not known."""
        if value is None:
            return "–"
        return _UNITS[self.unit](value) if math.isfinite(value) else "NaN" if math.isnan(value) else str(value)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        parts = ("key", "name", "owner", "meaning", "unit", "better", "before", "after", "chance", "judged", "change")
        return {part: getattr(self, part) for part in parts}


def compared_numbers(
    before: Run, after: Run, layers: tuple[Sequence[Layer], Sequence[Layer]], *, judge: bool = True
) -> list[ComparedNumber]:
    """Every number that at least one of the runs knows. ``layers``: of both, from ``layers_of``.

    judge: say which is better; of two models that have nothing in common, nobody can.
    """
    runs = (before, after)
    found = [
        _number("steps", (float(steps_of(run)) for run in runs)),
        *_over_steps(before, after),
        *_skips(before, after),
        _number("worst_lost", (_worst_lost(some) for some in layers)),
        _number("lost", (_lost(some) for some in layers)),
        *[
            _number(key, (_timed(run, key) for run in runs), chance=_chance_of(key, runs))
            for key in TIMES
            if key in NUMBERS
        ],
        _number("peak_memory", (_peak_memory(run) for run in runs)),
        _number("host_peak", (number(mapping(run, "memory").get("host_peak")) for run in runs)),
    ]
    known = [one for one in found if one.before is not None or one.after is not None]
    return known if judge else [replace(one, better="") for one in known]


def steps_in_common(before: Run, after: Run) -> int:
    """Up to which step both runs have come, by the first optimizer that both have; 0 where there is none."""
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
        chance=None if chance is None else max(chance, about.of_itself * larger, about.at_least),
        owner=owner,
    )


# --- over steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The end of what two runs have in common."""

    first: int
    last: int

    @classmethod
    def ending(cls, last: int) -> _Stretch:
        length = max(math.ceil(last * STRETCH), SHORTEST_STRETCH)
        return cls(max(1, last - length + 1), last)

    def __str__(self) -> str:
        return f"step {self.last:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"

    def holds(self, bucket: Bucket) -> bool:
        """Steps that a record has merged count by their middle."""
        return self.first <= (bucket.first + bucket.last) / 2 <= self.last


def _shared_lines(before: Run, after: Run) -> Iterator[tuple[int, _Stretch, list[Bucket], list[Bucket]]]:
    """Of each optimizer that both runs have: the end of what they share, and the steps up to it."""
    old, new = by_optimizer(before.steps), by_optimizer(after.steps)
    for optimizer in sorted(old.keys() & new.keys())[:MOST_OPTIMIZERS]:
        lines = old[optimizer], new[optimizer]
        last = min(max(bucket.last for bucket in line) for line in lines)
        shared = [[bucket for bucket in line if bucket.first <= last] for line in lines]
        yield optimizer, _Stretch.ending(last), shared[0], shared[1]


def _over_steps(before: Run, after: Run) -> Iterator[ComparedNumber]:
    several = len({bucket.optimizer for run in (before, after) for bucket in run.steps}) > 1
    names = optimizer_names(after)
    for optimizer, stretch, *shared in _shared_lines(before, after):
        owner = names.get(optimizer, f"optimizer {optimizer}") if several else ""
        ends = [_end(line, stretch) for line in shared]
        chance = _clear([wanders for _, wanders in ends])
        yield _number("loss_at_end", (mean for mean, _ in ends), chance=chance, owner=owner, at=str(stretch))
        lowest = _number("lowest_loss", (_lowest(line) for line in shared), chance=chance, owner=owner)
        # Of a loss that ended as no number, it says nothing how low it had been.
        diverged = any(mean is not None and not math.isfinite(mean) for mean, _ in ends)
        yield replace(lowest, better="") if diverged else lowest
        yield _number("median_norm", (_median(bucket.norm for bucket in line) for line in shared), owner=owner)
        yield _number("last_scale", (_last_scale(run, optimizer) for run in (before, after)), owner=owner)


def _end(line: Sequence[Bucket], stretch: _Stretch) -> tuple[float | None, float | None]:
    """The mean loss, and how far the means of tenths of the stretch lie from it; None for what is not known.

    The loss is NaN where it was not finite at any step of the stretch: a mean of the others would praise it.
    """
    within = [bucket.loss for bucket in line if stretch.holds(bucket) and bucket.loss.known]
    within = within or [bucket.loss for bucket in line[-1:] if bucket.loss.known]
    if not within:
        return None, None
    total = Spread.over(within)
    if total.bad or total.mean is None or total.low is None or total.high is None:
        return math.nan, None
    means = [mean for mean in (Spread.over(block).mean for block in _blocks(within)) if mean is not None]
    if len(means) >= FEWEST_BLOCKS:
        return total.mean, statistics.stdev(means)
    # A few merged steps: their extremes are known, and a loss wanders no further than that.
    return total.mean, total.high - total.low if total.finite >= FEWEST_BLOCKS else None


def _blocks(line: Sequence[Part]) -> list[Sequence[Part]]:
    """At most BLOCKS parts, all as long but for the last."""
    length = math.ceil(len(line) / BLOCKS)
    return [line[start : start + length] for start in range(0, len(line), length)]


def _clear(wander: Sequence[float | None]) -> float | None:
    """The least difference that is clear, from how far the numbers of both runs wander; None where one does not say."""
    known = [one for one in wander if one is not None]
    return CLEAR * sum(known) if len(known) == len(wander) else None


def _lowest(line: Iterable[Bucket]) -> float | None:
    return min((bucket.loss.low for bucket in line if bucket.loss.low is not None), default=None)


def _median(spreads: Iterable[Spread]) -> float | None:
    """Of steps, where merged ones count as often as they were."""
    means = sorted((spread.mean, spread.finite) for spread in spreads if spread.mean is not None)
    half = sum(times for _, times in means) / 2
    passed = itertools.accumulate(times for _, times in means)
    return next((mean for (mean, _), so_far in zip(means, passed, strict=True) if so_far >= half), None)


def _last_scale(run: Run, optimizer: int) -> float | None:
    return next((bucket.scale.mean for bucket in reversed(run.rows(optimizer)) if bucket.scale.mean is not None), None)


def _not_finite(steps: Sequence[Bucket]) -> float | None:
    known = any(bucket.loss.known for bucket in steps)
    return float(sum(bucket.loss.bad for bucket in steps)) if known else None


def _skips(before: Run, after: Run) -> Iterator[ComparedNumber]:
    runs = (before, after)
    lines = [shared for _, _, *shared in _shared_lines(before, after)]
    both = [[bucket for shared in lines for bucket in shared[which]] for which in range(len(runs))]
    bad, bad_in_all = [_not_finite(steps) for steps in both], [_not_finite(run.steps) for run in runs]
    if any(bad_in_all):
        yield _number("losses_not_finite", bad)
    if bad_in_all != bad:
        yield _number("losses_not_finite_in_all", bad_in_all)
    yield _number("skipped", (sum(bucket.skipped for bucket in run.steps) if run.steps else None for run in runs))
    taken, rates = [sum(bucket.count for bucket in steps) for steps in both], [skip_rate(steps) for steps in both]
    # As often as something rare happens by chance: within two roots of its count.
    chance = 2 * math.sqrt(sum((rate or 0.0) / max(1, of) for rate, of in zip(rates, taken, strict=True)))
    yield _number("skip_rate", rates, chance=chance)


# --- layers, time, memory ------------------------------------------------------------------------------------------


def _worst_lost(layers: Sequence[Layer]) -> float | None:
    return max((layer.lost for layer in layers if layer.lost is not None), default=None)


def _lost(layers: Sequence[Layer]) -> float | None:
    known = [layer.underflow for layer in layers if layer.underflow is not None]
    values = sum(one.values for one in known)
    return None if not known else sum(one.lost for one in known) / values if values else 0.0


def _timed(run: Run, key: str) -> float | None:
    return number(mapping(run, "timing").get(key))


def _chance_of(key: str, runs: tuple[Run, Run]) -> float | None:
    """How much a number of ``timing`` goes up and down by itself: of the time alone does the record show it."""
    return _clear([_time_wanders(run) for run in runs]) if key == "seconds_per_step" else 0.0


def _time_wanders(run: Run) -> float | None:
    """How far the means of tenths of the run lie from each other, without the first, in which it warms up."""
    line = next(iter(by_optimizer(run.steps).values()), [])
    blocks = _blocks(line) if line else []
    ends = [(block[-1].ended, block[-1].last) for block in blocks]
    means = [(to - since) / max(1, last - first) for (since, first), (to, last) in itertools.pairwise(ends)]
    return statistics.stdev(means) if len(means) >= FEWEST_BLOCKS else None


def _peak_memory(run: Run) -> float | None:
    devices = as_mapping(mapping(run, "memory").get("devices")).values()
    peaks = [number(as_mapping(device).get("peak_allocated")) for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


# --- words ---------------------------------------------------------------------------------------------------------


def _of_finite(old: float, new: float) -> str:
    """A loss that is a number is better than one that is none, whichever it is."""
    if math.isfinite(old) == math.isfinite(new):
        return ""
    return "better" if math.isfinite(new) else "worse"


def _amount(old: float, new: float, unit: str) -> str:
    """How much it changed: "−12%", "+3.1 points", "×40"."""
    if not (math.isfinite(old) and math.isfinite(new)):
        return ""
    if unit == "share":
        return _signed(100 * (new - old), " points")
    if old <= 0 or new <= 0:
        return f"{new - old:+.3g}".replace("-", "−", 1)
    factor = new / old
    if unit == "scale" or factor >= FACTOR or factor <= 1 / FACTOR:
        return f"×{factor:.3g}" if factor > 1 else f"÷{old / new:.3g}"
    return _signed(100 * (factor - 1), "%")


def _signed(hundredths: float, unit: str) -> str:
    much = abs(hundredths)
    if much < 0.05:
        return f"{'down' if hundredths < 0 else 'up'} by less than 0.1{unit}"
    told = f"{much:,.0f}" if much >= 10 else f"{much:.1f}"
    return f"{'−' if hundredths < 0 else '+'}{told}{unit}"


_UNITS: Mapping[str, Callable[[float], str]] = {
    "": lambda value: f"{value:.4g}",
    "count": lambda value: f"{value:,.0f}",
    "scale": scale_words,
    "share": percent,
    "seconds": duration,
    "bytes": size,
}
