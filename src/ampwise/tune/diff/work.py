"""The runs that a difference takes, in their order.

Forward, then forward and backward again, each side by itself: what modules return is kept while no backward pass will
need what it saved, and gradients are kept when most of that is gone. So there is never much more memory in use than in
a plain step. Gradients that there is no room for beside the second side are left to a second round of both sides; what
there is no room for then, either, goes to the host's memory, which takes longer than to compute it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.evidence.compared import Measured
from ampwise.evidence.wording import number
from ampwise.tune.diff.calls import Call, Calls, Place
from ampwise.tune.diff.draws import Draws
from ampwise.tune.diff.expecting import Numbers
from ampwise.tune.diff.ops import ComparingOps, KeepingOps, Tape, Wanted
from ampwise.tune.diff.passes import Comparing, ComparingGradients, Keeping, KeepingGradients, Outline
from ampwise.tune.diff.placing import Placed
from ampwise.tune.diff.room import Room
from ampwise.tune.diff.shelf import Shelf, legible
from ampwise.tune.diff.stage import Dropping, NeedsSaved, Ran, Stage
from ampwise.tune.diff.statistics import Factors, Ledger

__all__ = ["Gradients", "Progress", "Work"]

FIRST_SCALE = 2.0**16  # as a GradScaler's; it is halved until gradients are finite

Progress = Callable[[str], None]
T = TypeVar("T", bound=Calls)


@dataclass(slots=True)
class Gradients:
    """Of parameters, compared."""

    measured: dict[str, Measured] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0  # of all of them together, between two runs of the first side


class Work:
    """Two sides of a stage."""

    def __init__(self, stage: Stage, a: Placed, b: Placed, draws: Draws, progress: Progress) -> None:
        self._stage, self.a, self.b, self._draws, self._say = stage, a, b, draws, progress
        self._drops = not (a.side.compiled or b.side.compiled)
        self._saved: dict[str, int] = {}  # bytes, by side
        self._room = Room(a.device)
        self.outline = Outline()
        self.only_b: dict[Place, Call] = {}
        self.losses: dict[str, float | None] = {}
        self.whole_kernels: dict[str, None] = {}  # modules whose products nothing emulates
        self.went_back = False
        self.moved = 0  # bytes that were kept on the host

    @property
    def _unscaled(self) -> Factors:
        """What undoes the scales of the losses."""
        return 1 / self.a.scale, 1 / self.b.scale

    def check_patterns(self) -> None:
        """An error where a pattern matches no module, of those that are known by now."""
        self._stage.names.check_patterns()

    def find_scale(self, placed: Placed) -> None:
        """The scale that a GradScaler would arrive at."""
        if not placed.side.is_scaled and placed.side.scale is None:
            return
        placed.scale = placed.side.scale or FIRST_SCALE
        while placed.side.scale is None and placed.scale > 1:
            self._say(f"{placed.side.label}: loss scale {number(placed.scale)}")
            ran = self._stage.run(placed, Calls(self._stage.names), self._draws)
            if not _overflowed(ran):
                return
            placed.scale /= 2

    # Forward

    def forward(self, *, floor: bool) -> Numbers:
        """What modules are given and return."""
        if self._drops:
            try:
                return self._forward(floor)
            except (NeedsSaved, BadInput):  # a function that takes derivatives by itself: then nothing is dropped
                self._drops = False
        return self._forward(floor)

    def _forward(self, floor: bool) -> Numbers:
        names = self._stage.names
        keeping, saved = self._pass("a", self.a, self._keeping)
        shelf = keeping.shelf
        floors = self._forward_floors(shelf) if floor else {}
        other, dropped = self._pass("b", self.b, lambda _: Comparing(names, self.outline, shelf, last=True))
        self._saved = {"a": saved.bytes, "b": dropped.bytes}
        self._room.saved(saved.bytes)
        self.only_b = other.only_here
        if self.b.side.recipe is not None:
            self.whole_kernels |= other.whole_kernels
        if self.a.side.recipe is not None:
            self.whole_kernels |= keeping.whole_kernels
        self.moved += shelf.moved
        return Numbers(
            measured=other.ledger.settled(),
            unlike=other.unlike,
            floors=floors,
            roundoff=self.a.side.roundoffs[0] + self.b.side.roundoffs[0],
            flushed_below=self.b.side.flushed_below,
        )

    def _keeping(self, dropping: Dropping) -> Keeping:
        self.outline = Outline()
        return Keeping(self._stage.names, self.outline, Shelf(lambda: self._room.forward(dropping.bytes)))

    def _forward_floors(self, shelf: Shelf) -> dict[int, float]:
        """By slot; of what was not there again, the error is infinite."""
        names = self._stage.names
        again, _ = self._pass("a again", self.a, lambda _: Comparing(names, self.outline, shelf, last=False))
        floors = dict.fromkeys(self.outline.places.values(), math.inf)
        return floors | {slot: each.relative for slot, each in again.ledger.settled().items()}

    def _pass(self, which: str, placed: Placed, make: Callable[[Dropping], T]) -> tuple[T, Dropping]:
        """A forward pass alone."""
        self._say(f"{which} ({placed.side.label}), forward")
        dropping = Dropping()
        calls = make(dropping)
        used = dropping if self._drops else None
        ran = self._stage.run(placed, calls, self._draws, backward=False, dropping=used)
        self.losses[which] = None if ran.loss is None else float(ran.loss.double())
        return calls, dropping

    # Forward and backward

    def backward(self, *, floor: bool) -> tuple[Numbers, list[int], Gradients]:
        """Gradients by what modules return, the order in which they came, and those of parameters."""
        keeping = self._keeping_gradients()
        ran = self._both_ways("a", self.a, keeping)
        self.went_back = ran.went_back
        comparing, other = self._held_against(keeping)
        ledger, unlike = _compared(ran.gradients, other.gradients, self._unscaled)
        del other
        gradients = Gradients(ledger.settled(), unlike)
        measured, strange = comparing.ledger.settled(), comparing.unlike
        if floor or keeping.put_off:
            again = self._keeping_gradients(keeping.put_off)
            rerun = self._both_ways("a again", self.a, again)
            if floor:
                gradients.floors, gradients.noise = self._floors(ran, rerun)
            del ran, rerun
            if keeping.put_off:
                second, _ = self._held_against(again)
                measured, strange = measured | second.ledger.settled(), strange | second.unlike
        numbers = Numbers(
            measured=measured,
            unlike=strange,
            roundoff=self.a.side.roundoffs[1] + self.b.side.roundoffs[1],
            flushed_below=self.b.side.flushed_below / self.b.scale,
        )
        return numbers, keeping.order, gradients

    def _keeping_gradients(self, only: Collection[int] | None = None) -> KeepingGradients:
        return KeepingGradients(self._stage.names, self.outline, Shelf(self._beside_b), self._room, only)

    def _beside_b(self) -> float:
        """Bytes that may be kept of a, on its device, for when b goes forward and back."""
        weights = sum(each.nbytes for each in self._stage.names.parameters())
        saved_a, saved_b = self._saved.get("a", 0), self._saved.get("b", 0)
        is_elsewhere = self.a.device.type != self.b.device.type
        share = 0.0 if is_elsewhere else saved_b / saved_a if saved_a else 1.0
        return self._room.beside(share, weights)

    def _held_against(self, keeping: KeepingGradients) -> tuple[ComparingGradients, Ran]:
        comparing = ComparingGradients(self._stage.names, self.outline, keeping.shelf, self._unscaled)
        other = self._both_ways("b", self.b, comparing)
        self.moved += keeping.shelf.moved
        return comparing, other

    def _both_ways(self, which: str, placed: Placed, calls: Calls) -> Ran:
        self._say(f"{which} ({placed.side.label}), forward and backward")
        return self._stage.run(placed, calls, self._draws)

    def _floors(self, ran: Ran, again: Ran) -> tuple[dict[str, float], float]:
        """By parameter, and of all together: a gradient that is zero but for rounding says nothing by itself."""
        ledger, _ = _compared(ran.gradients, again.gradients, (self._unscaled[0],) * 2)
        found = ledger.settled()
        apart = math.hypot(*(each.norm_error for each in found.values()))
        norm = math.hypot(*(each.norm_a for each in found.values()))
        return {name: each.relative for name, each in found.items()}, apart / norm if norm else 0.0

    # Operation by operation

    def operations(self, wanted: Wanted, *, backward: bool) -> tuple[Tape, Numbers]:
        """Those that are wanted, forward and perhaps backward."""
        names = self._stage.names
        shelf = Shelf(lambda: self._room.forward(self._saved.get("a", 0)))
        keeping = KeepingOps(names, wanted, shelf)
        self._say(f"a ({self.a.side.label}), operation by operation")
        self._stage.run(self.a, keeping, self._draws, backward=backward)
        comparing = ComparingOps(names, wanted, keeping.tape, shelf, self._unscaled)
        self._say(f"b ({self.b.side.label}), operation by operation")
        self._stage.run(self.b, comparing, self._draws, backward=backward)
        self.moved += shelf.moved
        roundoff = max(map(sum, zip(self.a.side.roundoffs, self.b.side.roundoffs, strict=True)))
        return keeping.tape, Numbers(measured=comparing.ledger.settled(), roundoff=roundoff)


def _overflowed(ran: Ran) -> bool:
    """The gradients alone: of a loss that is not finite by itself, no scale makes finite ones."""
    if ran.loss is None or not math.isfinite(float(ran.loss)):
        return False
    found = [legible(each) for each in ran.gradients.values()]
    return not all(bool(each.isfinite().all()) for each in found if each is not None)


def _compared(a: dict[str, Tensor], b: dict[str, Tensor], factors: Factors) -> tuple[Ledger, dict[str, str]]:
    """By names."""
    ledger, unlike = Ledger(), {}
    for name in dict.fromkeys((*a, *b)):
        one, other = (legible(each[name]) if name in each else None for each in (a, b))
        if one is None and other is None:
            continue
        if one is None or other is None or one.shape != other.shape:
            unlike[name] = "only in a has it one" if other is None else "only in b has it one"
        else:
            ledger.add(name, one, other, factors)
    return ledger, unlike
