"""Time to equal held-back loss: curves of several runs, compared with intervals, and their words."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ampwise.report.result_view import Headline, Line, Part, ResultTable, ShownResult
from ampwise.tune.bench.speeds import quantile
from ampwise.tune.bench.verdict import ratio_text

DRAWS = 1000  # of the bootstrap
COVERED = 0.95  # by an interval
ENOUGH = 0.9  # of the draws have to give a ratio
FASTER, SLOWER, SAME, NOTHING = "faster", "slower", "no difference shown", "not compared"
MOODS = {FASTER: "ok", SLOWER: "info"}

Curve = list[tuple[float, float]]  # steps and loss; steps rise, losses fall


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCurve:
    """One run: the time of a step, and at each point of the training the loss of every held-back batch."""

    label: str
    seed: int
    step_s: float
    losses: tuple[tuple[float, ...], ...]
    skipped: int = 0  # steps

    @property
    def final(self) -> float:
        """Its last held-back loss."""
        return fmean(self.losses[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio, and the interval that covers it; None where it cannot be estimated."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """
        >>> Interval(value=1.2, low=1.1, high=1.31).text
        '1.20× (1.10–1.31)'
        """
        if self.low is None or self.high is None:
            return ratio_text(self.value)
        return f"{ratio_text(self.value)} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualLossRow:
    """A precision against the first one."""

    label: str
    step_s: float
    final: float  # held-back loss at the end
    skipped: int = 0
    speed: Interval | None = None  # of a step
    steps: float | None = None  # times as many, to the same loss
    gain: Interval | None = None  # times as fast to the same loss
    by_seed: tuple[float | None, ...] = ()  # the gain in each pair of runs
    target: float | None = None  # the loss that both reach
    problem: str | None = None

    @property
    def verdict(self) -> str:
        """Whether it is faster at equal loss."""
        if self.gain is None or self.gain.low is None or self.gain.high is None:
            return NOTHING
        return FASTER if self.gain.low > 1 else SLOWER if self.gain.high < 1 else SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualLoss(ShownResult):
    """Precisions compared by the time that they take to the same held-back loss; ``print`` shows it."""

    name: str
    device_name: str
    base: str
    points: tuple[int, ...]  # steps after which losses were measured
    runs: tuple[TrainingCurve, ...]
    rows: tuple[EqualLossRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict in a sentence."""
        others = [row for row in self.rows if row.gain is not None]
        if not others:
            return f"nothing to compare with {self.base}: {'; '.join(filter(None, (row.problem for row in self.rows)))}"
        best = max(others, key=lambda row: row.gain.value if row.gain else 0.0)
        assert best.gain is not None
        assert best.speed is not None
        per_step = f"a step is {ratio_text(best.speed.value)} as fast, and it takes {best.steps:.2f} times the steps"
        if best.verdict == FASTER:
            return f"{best.label} reaches the same loss {best.gain.text} as fast as {self.base}: {per_step}"
        if best.verdict == SLOWER:
            return (
                f"stay with {self.base}: {best.label} reaches the same loss only {best.gain.text} as fast: {per_step}"
            )
        return f"stay with {self.base}: {best.label} is {best.gain.text} as fast to the same loss, which may be chance"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        for row, plain in zip(self.rows, data["rows"], strict=True):
            plain["verdict"] = row.verdict
        return data | {"verdict": self.verdict}

    def _parts(self) -> Iterator[Part]:
        seeds = len({run.seed for run in self.runs})
        yield Line(f"{self.name} on {self.device_name}, {self.points[-1]:,} steps, {seeds} seeds", "dim")
        best = max(self.rows, key=lambda row: row.gain.value if row.gain else 0.0)
        yield Headline(self.verdict, "equal loss", MOODS.get(best.verdict, ""))
        headings = ("precision", "step", "×step", "held-back loss", "at loss", "×steps", "×at equal loss", "verdict")
        yield ResultTable(headings=headings, rows=[*map(self._cells, self.rows)], left=(0, 7))
        yield from (Line(f"{row.label}: {row.problem}", "yellow") for row in self.rows if row.problem)
        yield from (Line(note, "dim") for note in self.notes)

    def _cells(self, row: EqualLossRow) -> list[str]:
        is_base = row.label == self.base
        return [
            row.label,
            f"{1e3 * row.step_s:.3g} ms",
            "" if row.speed is None else row.speed.text,
            f"{row.final:.4g}",
            "" if row.target is None else f"{row.target:.4g}",
            "" if row.steps is None else f"{row.steps:.2f}",
            "" if row.gain is None else row.gain.text,
            "" if is_base else row.verdict,
        ]


def compare_curves(runs: Sequence[TrainingCurve], points: Sequence[int], base: str) -> tuple[EqualLossRow, ...]:
    """Compare each precision with ``base``, at the lowest loss that both reach.

    The runs of a seed see the same batches from the same weights. Intervals are percentiles of a bootstrap over seeds,
    in pairs, and over held-back batches.
    """
    by_label: dict[str, list[TrainingCurve]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        by_label.setdefault(run.label, []).append(run)
    return tuple(_row(label, by_label[base], own, points, is_base=label == base) for label, own in by_label.items())


def _row(
    label: str, wide: list[TrainingCurve], own: list[TrainingCurve], points: Sequence[int], *, is_base: bool
) -> EqualLossRow:
    step_s = median(run.step_s for run in own)
    final, skipped = fmean(run.final for run in own), sum(run.skipped for run in own)
    made: dict[str, Any] = {"label": label, "step_s": step_s, "final": final, "skipped": skipped}
    if is_base:
        return EqualLossRow(**made)
    seeds, batches = range(len(own)), range(len(own[0].losses[0]))
    found = _at_equal_loss(wide, own, points, seeds, batches)
    made["speed"] = _interval(
        _speed(wide, own, seeds), lambda draw: _speed(wide, own, draw.choices(seeds, k=len(seeds)))
    )
    if found is None:
        return EqualLossRow(
            **made, problem="the held-back loss did not fall in both, or is not finite: there is no loss to compare at"
        )

    def drawn(draw: random.Random) -> float | None:
        chosen, seen = draw.choices(seeds, k=len(seeds)), draw.choices(batches, k=len(batches))
        again = _at_equal_loss(wide, own, points, chosen, seen)
        return None if again is None else again[2]

    pairs = (_at_equal_loss(wide, own, points, [seed], batches) for seed in seeds)
    return EqualLossRow(
        **made,
        target=found[0],
        steps=found[1],
        gain=_interval(found[2], drawn),
        by_seed=tuple(None if pair is None else pair[2] for pair in pairs),
    )


def _speed(wide: Sequence[TrainingCurve], own: Sequence[TrainingCurve], seeds: Sequence[int]) -> float:
    return math.exp(fmean(math.log(wide[seed].step_s / own[seed].step_s) for seed in seeds))


def _at_equal_loss(
    wide: Sequence[TrainingCurve],
    own: Sequence[TrainingCurve],
    points: Sequence[int],
    seeds: Sequence[int],
    batches: Sequence[int],
) -> tuple[float, float, float] | None:
    """Return the lowest loss that both reach, times as many steps, and times as fast; None if one did not learn."""
    means = [_mean_losses(runs, seeds, batches) for runs in (wide, own)]
    if not all(math.isfinite(loss) for losses in means for loss in losses):
        return None
    curves = [falling(points, losses) for losses in means]
    target = max(curve[-1][1] for curve in curves)
    taken = [steps_to(curve, target) for curve in curves]
    if min(taken) <= 0:
        return None
    steps = taken[1] / taken[0]
    return target, steps, _speed(wide, own, seeds) / steps


def _mean_losses(runs: Sequence[TrainingCurve], seeds: Sequence[int], batches: Sequence[int]) -> list[float]:
    return [
        fmean(runs[seed].losses[point][batch] for seed in seeds for batch in batches)
        for point in range(len(runs[0].losses))
    ]


def falling(points: Sequence[float], losses: Sequence[float]) -> Curve:
    """Return the falling curve nearest to the losses (isotonic regression): noise does not count as progress.

    >>> falling([0, 1, 2, 3], [4.0, 2.0, 3.0, 1.0])
    [(0.0, 4.0), (1.5, 2.5), (3.0, 1.0)]
    """
    blocks: list[list[float]] = []  # sums of points and losses, and how many
    for point, loss in zip(points, losses, strict=True):
        blocks.append([point, loss, 1.0])
        while len(blocks) > 1 and not blocks[-1][1] / blocks[-1][2] < blocks[-2][1] / blocks[-2][2]:
            last = blocks.pop()
            blocks[-1] = [one + other for one, other in zip(blocks[-1], last, strict=True)]
    return [(point / count, loss / count) for point, loss, count in blocks]


def steps_to(curve: Curve, loss: float) -> float:
    """Return after how many steps a falling curve comes to a loss, between its points in a straight line.

    >>> steps_to([(0, 4.0), (10, 2.0)], 3.0), steps_to([(0, 4.0), (10, 2.0)], 5.0)
    (5.0, 0.0)
    """
    if loss >= curve[0][1]:
        return 0.0
    for (before, high), (after, low) in pairwise(curve):
        if low <= loss:
            return min(before + (after - before) * (high - loss) / (high - low), after)  # rounding may exceed it
    return math.inf


def _interval(value: float, draw: Callable[[random.Random], float | None]) -> Interval:
    numbers = random.Random(0)
    drawn = [each for _ in range(DRAWS) if (each := draw(numbers)) is not None]
    if len(drawn) < ENOUGH * DRAWS:
        return Interval(value=value)
    tail = (1 - COVERED) / 2
    return Interval(value=value, low=quantile(drawn, tail), high=quantile(drawn, 1 - tail))
