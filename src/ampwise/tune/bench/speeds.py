"""Step times in each precision: measurements as plain data for the rules about speed."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from ampwise.tune.bench.verdict import USE, SpeedVerdict, is_noisy, verdict_of
from ampwise.watch.time_use import HALVES, ProfiledMatmul

BASE = "fp32"  # the baseline

# Kinds of work in a step. The device time is their sum; the remainder of the step is idle.
KINDS = ("matrix", "attention", "elementwise", "casts", "optimizer", "copies", "other")

SIMPLEST = ("tf32", "bf16", "fp16", "fp8")  # at equal speed, the first is the simplest


def quantile(values: Iterable[float], share: float) -> float:
    """Return the quantile, with linear interpolation.

    >>> quantile([4, 1, 2, 3], 0.5), quantile([10, 20], 0.9), quantile([7], 0.1)
    (2.5, 19.0, 7.0)
    """
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpread:
    """Median of several measurements, and the range that contains 80% of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> TimeSpread:
        """
        >>> TimeSpread.of([1.0, 2.0, 3.0])
        TimeSpread(median=2.0, low=1.2, high=2.8)
        """
        return cls(median=quantile(values, 0.5), low=quantile(values, 0.1), high=quantile(values, 0.9))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """Loss of the same weights, batch and random numbers, and how far rounding may take it from FP32's."""

    loss: float
    reference: float | None  # None: FP32 could not be run
    tolerance: float | None
    finite_gradients: bool = True  # assumed under a loss scale, whose search needs overflows

    @property
    def finite(self) -> bool:
        """Whether the loss and gradients are finite."""
        return math.isfinite(self.loss) and self.finite_gradients

    @property
    def same(self) -> bool | None:
        """Whether it is the same computation as FP32; None if there is no reference."""
        if self.reference is None or self.tolerance is None:
            return None
        return self.finite and abs(self.loss - self.reference) <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Peak memory of a step in bytes, and its known parts."""

    peak: int
    parameters: int
    gradients: int
    optimizer: int

    @property
    def rest(self) -> int:
        """Activations, 16-bit copies, buffers and the batch."""
        return self.peak - self.parameters - self.gradients - self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Time of a profiled step, by kind of work."""

    seconds: Mapping[str, float]  # by kind; of kernels, or of operators on a CPU
    busy: float  # seconds in which the device was busy; on a CPU, in which an operator ran
    launches: int  # kernels, or operators
    on_device: bool  # whether kernels were seen

    def share(self, *kinds: str) -> float:
        """Return the fraction of the total time that these kinds take."""
        total = sum(self.seconds.values())
        return sum(self.seconds.get(kind, 0.0) for kind in kinds) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """A module, or several alike, with the seconds of its own forward and backward work by row label: the median of
    several profiled steps.
    """

    name: str  # "blocks.#.expand": # is a number
    kind: str
    times: int
    seconds: Mapping[str, float]
    certain: bool = True  # False: too short or too noisy for a meaningful ratio

    def ratio(self, label: str, base: str = BASE) -> float | None:
        """Return the speedup over FP32."""
        if not self.certain:
            return None
        own, its = self.seconds.get(label), self.seconds.get(base)
        return its / own if own and its else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClocks:
    """Clock of the multiprocessors in MHz, and what throttled it during the measurement."""

    before: int
    after: int
    lowest: int  # observed at the end of a round
    top: int  # maximum of the device
    held_back_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """One precision, eager or compiled. What could not be measured is None, and ``problem`` says why."""

    precision: str
    compiled: bool = False
    problem: str | None = None  # "out of memory", "not run: …"
    slower: float | None = None  # times as long as FP32, if it was given up after one pass
    loss: LossCheck | None = None
    step_s: TimeSpread | None = None
    ratio: TimeSpread | None = None  # speedup over FP32 in the same mode (eager or compiled), by rounds
    ratio_to_eager: TimeSpread | None = None  # speedup over eager FP32
    peak_flops: float | None = None  # from the datasheet
    peak_is_approximate: bool = False
    ridge: float | None = None  # FLOP/byte, from the datasheet
    memory: StepMemory | None = None
    split: TimeSplit | None = None
    products: tuple[ProfiledMatmul, ...] = ()  # of the profiled step
    intensity: float | None = None  # matmul FLOPs per byte read or written
    skipped: int = 0  # timed steps whose update was skipped because of the loss scale
    joules: float | None = None  # of a step, by the whole GPU

    @property
    def label(self) -> str:
        return f"{self.precision} compiled" if self.compiled else self.precision

    @property
    def is_half(self) -> bool:
        return self.precision in HALVES

    @property
    def differs(self) -> bool:
        """Whether it computes something different from FP32."""
        return self.loss is not None and self.loss.same is False

    @property
    def idle_share(self) -> float | None:
        """Fraction of a step that the device was idle; None on a CPU."""
        if self.split is None or self.step_s is None or not self.split.on_device:
            return None
        return max(0.0, 1 - self.split.busy / self.step_s.median)

    def per_second(self, count: float | None) -> float | None:
        """Return the rate per second of something that happens ``count`` times per step."""
        return None if count is None or self.step_s is None else count / self.step_s.median

    def peak_share(self, flops: float | None) -> float | None:
        """Return the fraction of the datasheet's peak reached, given the FLOPs of a step."""
        achieved = self.per_second(flops)
        return None if achieved is None or self.peak_flops is None else achieved / self.peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedComparison:
    """Comparison of a training step in each precision on one device."""

    name: str
    command: str  # that measures it, with all non-default options
    device: str  # "cuda", "cpu"
    device_name: str
    rows: tuple[PrecisionRow, ...]
    noise: float | None = None  # deviation from 1 of the ratio of FP32 to itself; None: not measured
    rounds: int = 0
    batch: int | None = None  # rows
    tokens: int | None = None
    kept: tuple[str, ...] = ()  # modules that 16-bit rows run in FP32
    flops: float | None = None  # of the matmuls of a step, as counted by torch
    layers: tuple[LayerTime, ...] = ()
    clocks: GpuClocks | None = None
    tf32_was_on: tuple[str, ...] = ()  # where the user's code has it on: "matmuls", "convolutions"
    bf16_instructions: bool | None = None  # whether the CPU has them
    not_measured: tuple[str, ...] = field(default=())  # sentences

    def row(self, precision: str, *, compiled: bool = False) -> PrecisionRow | None:
        """Return the row of a precision, if it was measured."""
        found = (row for row in self.rows if (row.precision, row.compiled) == (precision, compiled))
        return next((row for row in found if row.step_s is not None), None)

    @property
    def candidates(self) -> list[PrecisionRow]:
        """Rows to switch to: measured, not FP32, and the same computation."""
        others = (row for row in self.rows if row.precision != BASE and row.step_s is not None)
        return [row for row in others if not row.differs and row.ratio is not None]

    @property
    def best(self) -> PrecisionRow | None:
        """Fastest candidate; among those within the noise, the simplest."""
        eager = [row for row in self.candidates if not row.compiled] or self.candidates
        return _fastest(eager, self.noise or 0.0)

    @property
    def judged(self) -> PrecisionRow | None:
        """The best row with 16 bits or fewer, if it gains little even allowing for noise, so that rules look for the
        cause. None if the noise is larger than a worthwhile gain.
        """
        halves = [row for row in self.candidates if row.is_half]
        row = _fastest([row for row in halves if not row.compiled] or halves, self.noise or 0.0)
        if row is None or row.ratio is None or is_noisy(self.noise):
            return None
        return row if row.ratio.median * (1 + (self.noise or 0.0)) < USE else None

    def verdict(self, row: PrecisionRow) -> SpeedVerdict | None:
        """Return the verdict on a row; None if there is nothing to judge."""
        if row.ratio is None or row.precision == BASE or row.differs:
            return None
        return verdict_of(row.ratio.median, self.noise)

    def experiment(self, *options: str) -> str:
        """Return the command with these options replacing those of the same name, as an experiment to run."""
        head, *given = _parts(self.command)
        new = [part for option in options for part in _parts(option.partition(" | ")[0])]
        replaced = {name for name, *_ in new} - {"--keep"}  # which may be given several times
        kept = [part for part in given if part[0] not in replaced]
        pipes = (option.partition(" | ")[1:] for option in options)
        return shlex.join([*head, *chain.from_iterable([*kept, *new])]) + "".join("".join(pipe) for pipe in pipes)

    @property
    def align_command(self) -> str:
        """The command that finds misaligned layers of the same function."""
        (program, _, *make), *given = _parts(self.command)
        kept = [part for part in given if part[0] in ("--device", "--batch")]
        return shlex.join([program, "align", *make, *chain.from_iterable(kept)])

    def larger(self) -> str:
        """Return the command with four times the batch."""
        return self.experiment(f"--batch {4 * (self.batch or 1)}")

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with derived values."""
        data = asdict(self)
        for row, plain in zip(self.rows, data["rows"], strict=True):
            plain |= {
                "label": row.label,
                "verdict": self.verdict(row),
                "idle_share": row.idle_share,
                "samples_per_s": row.per_second(self.batch),
                "tokens_per_s": row.per_second(self.tokens),
                "flops_per_s": row.per_second(self.flops),
                "peak_share": row.peak_share(self.flops),
            }
            if row.loss is not None:
                plain["loss"]["same"] = row.loss.same
            if row.memory is not None:
                plain["memory"]["rest"] = row.memory.rest
        for layer, plain in zip(self.layers, data["layers"], strict=True):
            plain["ratio"] = {label: layer.ratio(label) for label in layer.seconds if label != BASE}
        return data


def _fastest(rows: Sequence[PrecisionRow], noise: float) -> PrecisionRow | None:
    ratios = {row.label: row.ratio for row in rows if row.ratio is not None}
    if not ratios:
        return None
    fastest = max(ratios.values(), key=lambda ratio: ratio.median)
    # A host-bound step varies more than FP32's: if their rounds overlap, the order is unknown.
    as_fast = [row for row in rows if ratios[row.label].high * (1 + noise) >= fastest.low]
    return min(as_fast, key=lambda row: (row.compiled, SIMPLEST.index(row.precision)))


def _parts(command: str) -> list[list[str]]:
    """Split into what precedes the options, if anything, and each option with its values."""
    parts: list[list[str]] = []
    for word in shlex.split(command):
        if word.startswith("--") or not parts:
            parts.append([])
        parts[-1].append(word)
    return parts
