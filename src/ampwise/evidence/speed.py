"""How fast a training step is in each precision: what was measured, as plain data for the rules in ``rules/speed``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ampwise.evidence.speed_command import changed
from ampwise.evidence.speed_verdict import USE, Verdict, is_noisy, verdict_of
from ampwise.evidence.timing import HALVES, MatrixProduct

__all__ = [
    "BASE",
    "KINDS",
    "GpuClocks",
    "LayerTime",
    "LossCheck",
    "Row",
    "Speeds",
    "Split",
    "Spread",
    "StepMemory",
    "quantile",
]

BASE = "fp32"  # what the others are compared with

# What a step does. The device's time is the sum of these; idle is what is left of the step.
KINDS = ("matrix", "attention", "elementwise", "casts", "optimizer", "copies", "other")
NOT_MATRIX = ("elementwise", "casts", "optimizer", "copies")  # limited by the memory, and not by the matrix units

TENTH, NINE_TENTHS = 0.1, 0.9  # the quantiles of a spread
SIMPLEST = ("tf32", "bf16", "fp16", "fp8")  # where two are as fast as each other, the first is less trouble


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which such a share lies, between two of them by a straight line.

    >>> quantile([4, 1, 2, 3], 0.5), quantile([10, 20], 0.9), quantile([7], 0.1)
    (2.5, 19.0, 7.0)
    """
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of several measurements the median, and between which values eight in ten of them lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """
        >>> Spread.of([1.0, 2.0, 3.0])
        Spread(median=2.0, low=1.2, high=2.8)
        """
        return cls(median=quantile(values, 0.5), low=quantile(values, TENTH), high=quantile(values, NINE_TENTHS))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """The loss of the same weights, batch and random numbers; and how far from FP32's rounding may take it."""

    loss: float
    reference: float | None  # None: FP32 could not be run
    tolerance: float | None
    finite_gradients: bool = True  # taken for granted under a loss scale, which is found by those that are not

    @property
    def finite(self) -> bool:
        """Whether a step by it leaves weights that are numbers."""
        return math.isfinite(self.loss) and self.finite_gradients

    @property
    def same(self) -> bool | None:
        """Whether it is the same computation; None where there is nothing to compare it with."""
        if self.reference is None or self.tolerance is None:
            return None
        return self.finite and abs(self.loss - self.reference) <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes at the peak of a step, and what they are known to be for."""

    peak: int
    parameters: int
    gradients: int
    optimizer: int

    @property
    def rest(self) -> int:
        """Activations, copies in 16 bits, buffers, the batch."""
        return self.peak - self.parameters - self.gradients - self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where the time of a profiled step went."""

    seconds: Mapping[str, float]  # by kind; of kernels, or on a CPU of operators
    busy: float  # seconds in which the device had something to do; of a CPU, in which an operator ran
    launches: int  # kernels, or operators
    on_device: bool  # whether kernels were seen

    def share(self, *kinds: str) -> float:
        """Of the time of all kinds, what these took."""
        total = sum(self.seconds.values())
        return sum(self.seconds.get(kind, 0.0) for kind in kinds) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """A module, or several alike: seconds of its own forward and backward work, by the label of the row; the median of
    several profiled steps."""

    name: str  # "blocks.#.expand": a number for each of them
    kind: str
    times: int
    seconds: Mapping[str, float]
    certain: bool = True  # False: so short, or on a machine so noisy, that a ratio would say nothing

    def ratio(self, label: str, base: str = BASE) -> float | None:
        """How many times as fast as in FP32."""
        if not self.certain:
            return None
        own, its = self.seconds.get(label), self.seconds.get(base)
        return its / own if own and its else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClocks:
    """The clock of the multiprocessors, in MHz, and what held it back while it was measured."""

    before: int
    after: int
    lowest: int  # seen at the end of a turn
    top: int  # that the device can reach
    held_back_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One precision, eager or compiled. What could not be measured is None, and ``problem`` says why."""

    precision: str
    compiled: bool = False
    problem: str | None = None  # "out of memory", "not run: …"
    slower: float | None = None  # times as long as FP32, where one pass was enough to give up
    loss: LossCheck | None = None
    step_s: Spread | None = None
    ratio: Spread | None = None  # of FP32's time, as eager or compiled as this, to its own; by rounds
    ratio_to_eager: Spread | None = None  # of eager FP32's time
    peak_flops: float | None = None  # the datasheet's
    peak_is_approximate: bool = False
    ridge: float | None = None  # FLOP/byte, likewise
    memory: StepMemory | None = None
    split: Split | None = None
    products: tuple[MatrixProduct, ...] = ()  # of the profiled step
    intensity: float | None = None  # FLOPs of matrix products for each byte that they read and write
    skipped: int = 0  # steps that a loss scale had no update of, of those that were timed

    @property
    def label(self) -> str:
        return f"{self.precision} compiled" if self.compiled else self.precision

    @property
    def is_half(self) -> bool:
        return self.precision in HALVES

    @property
    def differs(self) -> bool:
        """Whether it was seen to compute something else than FP32."""
        return self.loss is not None and self.loss.same is False

    @property
    def idle_share(self) -> float | None:
        """Of a step, what the device spent waiting; None where there is no device but the CPU."""
        if self.split is None or self.step_s is None or not self.split.on_device:
            return None
        return max(0.0, 1 - self.split.busy / self.step_s.median)

    def per_second(self, count: float | None) -> float | None:
        """So many a step, in a second."""
        return None if count is None or self.step_s is None else count / self.step_s.median

    def peak_share(self, flops: float | None) -> float | None:
        """Of what the datasheet promises for this precision, given the FLOPs of a step."""
        achieved = self.per_second(flops)
        return None if achieved is None or self.peak_flops is None else achieved / self.peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """A training step in each precision, on one device."""

    subject: str
    command: str  # that measures it, with every option that is not as it is by default
    device: str  # "cuda", "cpu"
    device_name: str
    rows: tuple[Row, ...]
    noise: float | None = None  # how far from 1 the ratio of FP32 to itself is; None: it was not measured
    rounds: int = 0
    batch: int | None = None  # rows
    tokens: int | None = None
    kept: tuple[str, ...] = ()  # modules that 16-bit rows run in FP32
    flops: float | None = None  # of the matrix products of a step, as torch counts them
    layers: tuple[LayerTime, ...] = ()
    clocks: GpuClocks | None = None
    tf32_was_on: tuple[str, ...] = ()  # for what the user's code has it on: "matrix products", "convolutions"
    bf16_instructions: bool | None = None  # of a CPU
    not_measured: tuple[str, ...] = field(default=())  # sentences

    def row(self, precision: str, *, compiled: bool = False) -> Row | None:
        """The row of a precision, if it was measured."""
        found = (row for row in self.rows if (row.precision, row.compiled) == (precision, compiled))
        return next((row for row in found if row.step_s is not None), None)

    @property
    def candidates(self) -> list[Row]:
        """Rows to go over to: measured, not FP32, and the same computation."""
        others = (row for row in self.rows if row.precision != BASE and row.step_s is not None)
        return [row for row in others if not row.differs and row.ratio is not None]

    @property
    def best(self) -> Row | None:
        """The fastest of them; of those that noise cannot tell from it, the one that is the least trouble."""
        eager = [row for row in self.candidates if not row.compiled] or self.candidates
        return _fastest(eager, self.noise or 0.0)

    @property
    def judged(self) -> Row | None:
        """The row that has to give a reason: the best with 16 bits or fewer, if it gains little for all that noise
        leaves open. Where two runs of the same differ by more than would be a gain, there is nothing to explain."""
        halves = [row for row in self.candidates if row.is_half]
        row = _fastest([row for row in halves if not row.compiled] or halves, self.noise or 0.0)
        if row is None or row.ratio is None or is_noisy(self.noise):
            return None
        return row if row.ratio.median * (1 + (self.noise or 0.0)) < USE else None

    def verdict(self, row: Row) -> Verdict | None:
        """None where there is nothing to judge."""
        if row.ratio is None or row.precision == BASE or row.differs:
            return None
        return verdict_of(row.ratio.median, self.noise)

    def experiment(self, *options: str) -> str:
        """The command that shows it: the same with one thing changed."""
        return changed(self.command, *options)

    def larger(self) -> str:
        """The same with four times the batch."""
        return self.experiment(f"--batch {4 * (self.batch or 1)}")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with what follows from it."""
        data = asdict(self)
        data["rows"] = [_row_dict(row, self) for row in self.rows]
        data["layers"] = [_layer_dict(layer) for layer in self.layers]
        return data


def _fastest(rows: Sequence[Row], noise: float) -> Row | None:
    ratios = {row.label: row.ratio for row in rows if row.ratio is not None}
    if not ratios:
        return None
    fastest = max(ratios.values(), key=lambda ratio: ratio.median)
    # A step that waits for the host strays more than FP32's does: where their rounds overlap, nobody knows.
    as_fast = [row for row in rows if ratios[row.label].high * (1 + noise) >= fastest.low]
    return min(as_fast, key=lambda row: (row.compiled, SIMPLEST.index(row.precision)))


def _row_dict(row: Row, speeds: Speeds) -> dict[str, Any]:
    data = asdict(row) | {"label": row.label, "verdict": speeds.verdict(row), "idle_share": row.idle_share}
    if row.loss is not None:
        data["loss"]["same"] = row.loss.same
    if row.memory is not None:
        data["memory"]["rest"] = row.memory.rest
    return data | {
        "samples_per_s": row.per_second(speeds.batch),
        "tokens_per_s": row.per_second(speeds.tokens),
        "flops_per_s": row.per_second(speeds.flops),
        "peak_share": row.peak_share(speeds.flops),
    }


def _layer_dict(layer: LayerTime) -> dict[str, Any]:
    ratios = {label: layer.ratio(label) for label in layer.seconds if label != BASE}
    return asdict(layer) | {"ratio": ratios}
