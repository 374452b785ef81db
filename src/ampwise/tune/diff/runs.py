"""The runs that a difference takes, in order.

First each side runs forward only, then forward and backward. Module outputs are kept while nothing is saved for a
backward pass, and gradients while most saved tensors are already freed, so memory use stays close to that of a plain
step. Gradients that do not fit beside the second side are left to a second round of both sides; what does not fit then
goes to host memory, which takes longer than recomputing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.numbers.number_text import number_text
from ampwise.tune.diff.expected_errors import PassComparisons
from ampwise.tune.diff.memory_budget import MemoryBudget
from ampwise.tune.diff.module_calls import ModuleCall, ModuleCalls, TensorPlace
from ampwise.tune.diff.op_tape import CompareOps, OpFilter, OpTape, RecordOps
from ampwise.tune.diff.passes import CompareForward, CompareGradients, PassOutline, RecordForward, RecordGradients
from ampwise.tune.diff.placed_side import PlacedSide
from ampwise.tune.diff.repeated_step import DroppedTensors, NeedsSaved, RepeatedStep, StepRun
from ampwise.tune.diff.shared_random import SharedRandom
from ampwise.tune.diff.statistics import Factors, Ledger
from ampwise.tune.diff.tensor_difference import TensorDifference
from ampwise.tune.diff.tensor_store import TensorStore, comparable_values

__all__ = ["DiffRuns", "ParameterGradients", "Progress"]

FIRST_SCALE = 2.0**16  # a GradScaler's default; it is halved until gradients are finite

Progress = Callable[[str], None]
T = TypeVar("T", bound=ModuleCalls)


@dataclass(slots=True)
class ParameterGradients:
    """Comparisons of parameter gradients."""

    measured: dict[str, TensorDifference] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0  # over all parameters, between two runs of the first side


class DiffRuns:
    """Runs two sides and compares them."""

    def __init__(
        self, stage: RepeatedStep, a: PlacedSide, b: PlacedSide, draws: SharedRandom, progress: Progress
    ) -> None:
        self._stage, self.a, self.b, self._draws, self._say = stage, a, b, draws, progress
        self._drops = not (a.side.compiled or b.side.compiled)
        self._saved: dict[str, int] = {}  # bytes, by side
        self._budget = MemoryBudget(a.device)
        self.outline = PassOutline()
        self.only_b: dict[TensorPlace, ModuleCall] = {}
        self.losses: dict[str, float | None] = {}
        self.whole_kernels: dict[str, None] = {}  # modules whose matmuls are not emulated
        self.went_back = False
        self.moved = 0  # bytes that were kept on the host

    @property
    def _unscaled(self) -> Factors:
        """Factors that undo the loss scales."""
        return 1 / self.a.scale, 1 / self.b.scale

    def check_patterns(self) -> None:
        """Raise UnknownName if a pattern matches no known module."""
        self._stage.names.check_patterns()

    def find_scale(self, placed: PlacedSide) -> None:
        """Find the scale that a GradScaler would settle at."""
        if not placed.side.is_scaled and placed.side.scale is None:
            return
        placed.scale = placed.side.scale or FIRST_SCALE
        while placed.side.scale is None and placed.scale > 1:
            self._say(f"{placed.side.label}: loss scale {number_text(placed.scale)}")
            ran = self._stage.run(placed, ModuleCalls(self._stage.names), self._draws)
            if not _overflowed(ran):
                return
            placed.scale /= 2

    # Forward

    def forward(self, *, floor: bool) -> PassComparisons:
        """Compare what modules receive and return."""
        if self._drops:
            try:
                return self._forward(floor)
            except (NeedsSaved, BadInput):  # the function computes derivatives itself: then nothing can be dropped
                self._drops = False
        return self._forward(floor)

    def _forward(self, floor: bool) -> PassComparisons:
        names = self._stage.names
        keeping, saved = self._pass("a", self.a, self._keeping)
        shelf = keeping.shelf
        floors = self._forward_floors(shelf) if floor else {}
        other, dropped = self._pass("b", self.b, lambda _: CompareForward(names, self.outline, shelf, last=True))
        self._saved = {"a": saved.bytes, "b": dropped.bytes}
        self._budget.saved(saved.bytes)
        self.only_b = other.only_here
        if self.b.side.recipe is not None:
            self.whole_kernels |= other.whole_kernels
        if self.a.side.recipe is not None:
            self.whole_kernels |= keeping.whole_kernels
        self.moved += shelf.moved
        return PassComparisons(
            measured=other.ledger.settled(),
            unlike=other.unlike,
            floors=floors,
            roundoff=self.a.side.roundoffs[0] + self.b.side.roundoffs[0],
            flushed_below=self.b.side.flushed_below,
        )

    def _keeping(self, dropping: DroppedTensors) -> RecordForward:
        self.outline = PassOutline()
        return RecordForward(self._stage.names, self.outline, TensorStore(lambda: self._budget.forward(dropping.bytes)))

    def _forward_floors(self, shelf: TensorStore) -> dict[int, float]:
        """Return the error by slot; infinite for tensors that did not appear again."""
        names = self._stage.names
        again, _ = self._pass("a again", self.a, lambda _: CompareForward(names, self.outline, shelf, last=False))
        floors = dict.fromkeys(self.outline.places.values(), math.inf)
        return floors | {slot: each.relative for slot, each in again.ledger.settled().items()}

    def _pass(self, which: str, placed: PlacedSide, make: Callable[[DroppedTensors], T]) -> tuple[T, DroppedTensors]:
        """Run a forward pass only."""
        self._say(f"{which} ({placed.side.label}), forward")
        dropping = DroppedTensors()
        calls = make(dropping)
        used = dropping if self._drops else None
        ran = self._stage.run(placed, calls, self._draws, backward=False, dropping=used)
        self.losses[which] = None if ran.loss is None else float(ran.loss.double())
        return calls, dropping

    # Forward and backward

    def backward(self, *, floor: bool) -> tuple[PassComparisons, list[int], ParameterGradients]:
        """Compare gradients: of module outputs, with the order in which they arrived, and of parameters."""
        keeping = self._keeping_gradients()
        ran = self._forward_and_backward("a", self.a, keeping)
        self.went_back = ran.went_back
        comparing, other = self._compare_gradients(keeping)
        ledger, unlike = _compared(ran.gradients, other.gradients, self._unscaled)
        del other
        gradients = ParameterGradients(ledger.settled(), unlike)
        measured, strange = comparing.ledger.settled(), comparing.unlike
        if floor or keeping.deferred:
            again = self._keeping_gradients(keeping.deferred)
            rerun = self._forward_and_backward("a again", self.a, again)
            if floor:
                gradients.floors, gradients.noise = self._floors(ran, rerun)
            del ran, rerun
            if keeping.deferred:
                second, _ = self._compare_gradients(again)
                measured, strange = measured | second.ledger.settled(), strange | second.unlike
        numbers = PassComparisons(
            measured=measured,
            unlike=strange,
            roundoff=self.a.side.roundoffs[1] + self.b.side.roundoffs[1],
            flushed_below=self.b.side.flushed_below / self.b.scale,
        )
        return numbers, keeping.order, gradients

    def _keeping_gradients(self, only: Collection[int] | None = None) -> RecordGradients:
        return RecordGradients(self._stage.names, self.outline, TensorStore(self._beside_b), self._budget, only)

    def _beside_b(self) -> float:
        """Return the bytes of a's gradients that may stay on its device while b runs forward and backward."""
        weights = sum(each.nbytes for each in self._stage.names.parameters())
        saved_a, saved_b = self._saved.get("a", 0), self._saved.get("b", 0)
        is_elsewhere = self.a.device.type != self.b.device.type
        share = 0.0 if is_elsewhere else saved_b / saved_a if saved_a else 1.0
        return self._budget.beside(share, weights)

    def _compare_gradients(self, keeping: RecordGradients) -> tuple[CompareGradients, StepRun]:
        comparing = CompareGradients(self._stage.names, self.outline, keeping.shelf, self._unscaled)
        other = self._forward_and_backward("b", self.b, comparing)
        self.moved += keeping.shelf.moved
        return comparing, other

    def _forward_and_backward(self, which: str, placed: PlacedSide, calls: ModuleCalls) -> StepRun:
        self._say(f"{which} ({placed.side.label}), forward and backward")
        return self._stage.run(placed, calls, self._draws)

    def _floors(self, ran: StepRun, again: StepRun) -> tuple[dict[str, float], float]:
        """Return the noise by parameter, and over all: a gradient that is only rounding error says nothing."""
        ledger, _ = _compared(ran.gradients, again.gradients, (self._unscaled[0],) * 2)
        found = ledger.settled()
        apart = math.hypot(*(each.norm_error for each in found.values()))
        norm = math.hypot(*(each.norm_a for each in found.values()))
        return {name: each.relative for name, each in found.items()}, apart / norm if norm else 0.0

    # Operation by operation

    def operations(self, wanted: OpFilter, *, backward: bool) -> tuple[OpTape, PassComparisons]:
        """Compare the wanted operations, forward and optionally backward."""
        names = self._stage.names
        shelf = TensorStore(lambda: self._budget.forward(self._saved.get("a", 0)))
        keeping = RecordOps(names, wanted, shelf)
        self._say(f"a ({self.a.side.label}), operation by operation")
        self._stage.run(self.a, keeping, self._draws, backward=backward)
        comparing = CompareOps(names, wanted, keeping.tape, shelf, self._unscaled)
        self._say(f"b ({self.b.side.label}), operation by operation")
        self._stage.run(self.b, comparing, self._draws, backward=backward)
        self.moved += shelf.moved
        roundoff = max(map(sum, zip(self.a.side.roundoffs, self.b.side.roundoffs, strict=True)))
        return keeping.tape, PassComparisons(measured=comparing.ledger.settled(), roundoff=roundoff)


def _overflowed(ran: StepRun) -> bool:
    """Whether gradients overflowed: if the loss itself is not finite, no scale helps."""
    if ran.loss is None or not math.isfinite(float(ran.loss)):
        return False
    found = [comparable_values(each) for each in ran.gradients.values()]
    return not all(bool(each.isfinite().all()) for each in found if each is not None)


def _compared(a: dict[str, Tensor], b: dict[str, Tensor], factors: Factors) -> tuple[Ledger, dict[str, str]]:
    """Compare gradients by name."""
    ledger, unlike = Ledger(), {}
    for name in dict.fromkeys((*a, *b)):
        one, other = (comparable_values(each[name]) if name in each else None for each in (a, b))
        if one is None and other is None:
            continue
        if one is None or other is None or one.shape != other.shape:
            unlike[name] = "no gradient in b" if other is None else "no gradient in a"
        else:
            ledger.add(name, one, other, factors)
    return ledger, unlike
