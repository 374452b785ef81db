"""The runs that a difference takes, in order.

First each side runs forward only, then forward and backward. Module outputs are kept while nothing is saved for a
backward pass, and gradients while most saved tensors are already freed, so memory use stays close to that of a plain
step. Gradients that do not fit beside the second side are left to a second round of both sides; what does not fit then
goes to host memory, which takes longer than recomputing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TypeVar

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.numbers.number_text import number_text
from ampwise.tune.diff.expected_errors import PassComparisons
from ampwise.tune.diff.module_calls import ModuleCall, ModuleCalls, TensorPlace
from ampwise.tune.diff.op_tape import CompareOps, OpFilter, OpTape, RecordOps
from ampwise.tune.diff.passes import CompareForward, CompareGradients, PassOutline, RecordForward, RecordGradients
from ampwise.tune.diff.repeated_step import DroppedTensors, NeedsSaved, PlacedSide, RepeatedStep, StepRun
from ampwise.tune.diff.shared_random import SharedRandom
from ampwise.tune.diff.statistics import Factors, Ledger
from ampwise.tune.diff.step_difference import ParameterRow
from ampwise.tune.diff.tensor_difference import ComparedTensor
from ampwise.tune.diff.tensor_store import MemoryBudget, TensorStore, comparable_values
from ampwise.tune.diff.token_difference import TokenComparison, TokenDifference

FIRST_SCALE = 2.0**16  # a GradScaler's default; it is halved until gradients are finite

Progress = Callable[[str], None]
T = TypeVar("T", bound=ModuleCalls)


class DiffRuns:
    """Runs two sides and compares them."""

    def __init__(
        self, step: RepeatedStep, a: PlacedSide, b: PlacedSide, draws: SharedRandom, progress: Progress
    ) -> None:
        self._step, self.a, self.b, self._draws, self._say = step, a, b, draws, progress
        self.names = step.names
        self._drops = not (a.side.compiled or b.side.compiled)
        self._saved = {"a": 0, "b": 0}  # bytes
        self._budget = MemoryBudget(a.device)
        self.outline = PassOutline()
        self.only_b: dict[TensorPlace, ModuleCall] = {}
        self.losses: dict[str, float | None] = {}
        self.whole_kernels: dict[str, None] = {}  # modules whose matmuls are not emulated
        self.went_back = False
        self.tokens: TokenDifference | None = None  # log-probabilities of the targets, if the function computes any
        self.token_noise: TokenDifference | None = None  # between two runs of the first side
        self.noise = 0.0  # of all gradients, between two runs of the first side
        self.moved = 0  # bytes that were kept on the host

    @property
    def _unscaled(self) -> Factors:
        """Factors that undo the loss scales."""
        return 1 / self.a.scale, 1 / self.b.scale

    def find_scale(self, placed: PlacedSide) -> None:
        """Find the scale that a GradScaler would settle at."""
        if not placed.side.is_scaled and placed.side.scale is None:
            return
        placed.scale = placed.side.scale or FIRST_SCALE
        while placed.side.scale is None and placed.scale > 1:
            self._say(f"{placed.side.label}: loss scale {number_text(placed.scale)}")
            ran = self._step.run(placed, ModuleCalls(self.names), self._draws)
            if ran.loss is None or not math.isfinite(float(ran.loss)):
                return  # no scale helps
            found = [comparable_values(each) for each in ran.gradients.values()]
            if all(bool(each.isfinite().all()) for each in found if each is not None):
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
        self.outline, names, dropped_a = PassOutline(), self.names, DroppedTensors()
        kept = TensorStore(lambda: self._budget.forward(dropped_a.bytes))
        tokens = TokenComparison(kept)
        one = self._pass("a", self.a, RecordForward(names, self.outline, kept, tokens), dropped_a)
        floors: dict[int, float] = {}
        if floor:
            again = self._pass("a again", self.a, CompareForward(names, self.outline, kept, tokens, last=False))
            self.token_noise = tokens.settled()
            floors = dict.fromkeys(self.outline.places.values(), math.inf)  # for tensors that did not appear again
            floors |= {slot: each.relative for slot, each in again.comparison.ledger.settled().items()}
        dropped_b = DroppedTensors()
        other = self._pass("b", self.b, CompareForward(names, self.outline, kept, tokens, last=True), dropped_b)
        self.tokens = tokens.settled()
        self._saved = {"a": dropped_a.bytes, "b": dropped_b.bytes}
        self._budget.saved(dropped_a.bytes)
        self.only_b = other.only_here
        for placed, calls in ((self.b, other), (self.a, one)):
            if placed.side.recipe is not None:
                self.whole_kernels |= calls.whole_kernels
        self.moved += kept.moved
        return PassComparisons(
            measured=other.comparison.ledger.settled(),
            unlike=other.comparison.unlike,
            floors=floors,
            roundoff=self.a.side.roundoffs[0] + self.b.side.roundoffs[0],
            flushed_below=self.b.side.flushed_below,
        )

    def _pass(self, which: str, placed: PlacedSide, calls: T, dropping: DroppedTensors | None = None) -> T:
        """Run a forward pass only."""
        self._say(f"{which} ({placed.side.label}), forward")
        dropping = (dropping or DroppedTensors()) if self._drops else None
        ran = self._step.run(placed, calls, self._draws, backward=False, dropping=dropping)
        self.losses[which] = None if ran.loss is None else float(ran.loss.double())
        return calls

    # Forward and backward

    def backward(self, *, floor: bool) -> tuple[PassComparisons, list[int], list[ParameterRow]]:
        """Compare gradients: of module outputs, with the order in which they arrived, and of parameters.

        With ``floor``, ``noise`` is the error over all parameters between two runs of the first side.
        """
        keeping = self._keeping_gradients()
        ran = self._forward_and_backward("a", self.a, keeping)
        self.went_back = ran.went_back
        first, other = self._compare_gradients(keeping)
        ledger, unlike = _compared(ran.gradients, other.gradients, self._unscaled)
        del other
        gradients, floors = ledger.settled(), dict[str, float]()
        measured, strange = first.comparison.ledger.settled(), first.comparison.unlike
        if floor or keeping.deferred:
            again = self._keeping_gradients(keeping.deferred)
            rerun = self._forward_and_backward("a again", self.a, again)
            if floor:
                noise = _compared(ran.gradients, rerun.gradients, (self._unscaled[0],) * 2)[0].settled()
                floors = {name: each.relative for name, each in noise.items()}
                # Over all parameters, as a gradient that is only rounding error says nothing.
                norm = math.hypot(*(each.norm_a for each in noise.values()))
                apart = math.hypot(*(each.norm_error for each in noise.values()))
                self.noise = apart / norm if norm else 0.0
            del ran, rerun
            if keeping.deferred:
                second, _ = self._compare_gradients(again)
                measured |= second.comparison.ledger.settled()
                strange |= second.comparison.unlike
        numbers = PassComparisons(
            measured=measured,
            unlike=strange,
            roundoff=self.a.side.roundoffs[1] + self.b.side.roundoffs[1],
            flushed_below=self.b.side.flushed_below / self.b.scale,
        )
        values = sum(each.values for each in gradients.values())
        typical = math.sqrt(math.fsum(each.norm_a**2 for each in gradients.values()) / values) if values else 0.0
        rows = []
        for name, each in gradients.items():
            compared = ComparedTensor(measured=each, floor=floors.get(name))
            rows.append(ParameterRow(name=name, compared=compared, share=each.rms / typical if typical else None))
        rows += [ParameterRow(name=name, compared=ComparedTensor(why_not=why)) for name, why in unlike.items()]
        return numbers, keeping.order, rows

    def _keeping_gradients(self, only: Collection[int] | None = None) -> RecordGradients:
        def beside_b() -> float:
            """Return the bytes of a's gradients that may stay on its device while b runs forward and backward."""
            weights = sum(each.nbytes for each in self.names.parameters())
            share = self._saved["b"] / self._saved["a"] if self._saved["a"] else 1.0
            return self._budget.beside(share if self.a.device.type == self.b.device.type else 0.0, weights)

        return RecordGradients(self.names, self.outline, TensorStore(beside_b), self._budget, only)

    def _compare_gradients(self, keeping: RecordGradients) -> tuple[CompareGradients, StepRun]:
        comparing = CompareGradients(self.names, self.outline, keeping.store, self._unscaled)
        other = self._forward_and_backward("b", self.b, comparing)
        self.moved += keeping.store.moved
        return comparing, other

    def _forward_and_backward(self, which: str, placed: PlacedSide, calls: ModuleCalls) -> StepRun:
        self._say(f"{which} ({placed.side.label}), forward and backward")
        return self._step.run(placed, calls, self._draws)

    # Operation by operation

    def operations(self, wanted: OpFilter, *, backward: bool) -> OpTape:
        """Compare the wanted operations, forward and optionally backward."""
        kept = TensorStore(lambda: self._budget.forward(self._saved["a"]))
        keeping = RecordOps(self.names, wanted, kept)
        comparing = CompareOps(self.names, wanted, keeping.tape, kept, self._unscaled)
        for which, placed, calls in (("a", self.a, keeping), ("b", self.b, comparing)):
            self._say(f"{which} ({placed.side.label}), operation by operation")
            self._step.run(placed, calls, self._draws, backward=backward)
        self.moved += kept.moved
        roundoff = max(map(sum, zip(self.a.side.roundoffs, self.b.side.roundoffs, strict=True)))
        keeping.tape.numbers = PassComparisons(measured=comparing.comparison.ledger.settled(), roundoff=roundoff)
        return keeping.tape


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
