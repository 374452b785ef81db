"""Expected rounding errors, by the model of ``tensor_difference``, and the places that exceed them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ampwise.tune.diff.module_calls import GIVEN, RETURNED, ModuleCall
from ampwise.tune.diff.passes import PassOutline, TensorEvent
from ampwise.tune.diff.side import SPREAD
from ampwise.tune.diff.step_difference import BACKWARD, FORWARD, ErrorLocation, ModuleRow
from ampwise.tune.diff.tensor_difference import SUMMING, ComparedTensor, TensorDifference

LOST = 0.05  # share of values flushed to zero above which flushing is the explanation
BACKWARD_OPS = 16  # assumed roundings between one gradient and the next, which are not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class PassComparisons:
    """All comparisons of a pass, by slot."""

    measured: Mapping[int, TensorDifference]
    unlike: Mapping[int, str] = field(default_factory=dict)
    floors: Mapping[int, float] = field(default_factory=dict)
    roundoff: float = 0.0  # sum of both sides
    flushed_below: float = 0.0  # typical magnitudes below which the second side's format flushes values to zero

    def __contains__(self, slot: int) -> bool:
        """Whether the second side has such a tensor."""
        return slot in self.measured or slot in self.unlike

    def compared(self, slot: int, part: str, given: float, ops: int) -> ComparedTensor | None:
        """Return the comparison of a slot; None if the second side has no such tensor."""
        if slot not in self:
            return None
        return ComparedTensor(
            part=part,
            measured=self.measured.get(slot),
            why_not=self.unlike.get(slot, ""),
            given=given,
            own=self.roundoff * math.sqrt(max(ops, 1)) + SUMMING,
            floor=self.floors.get(slot),
        )

    def error(self, slot: int) -> float:
        """Return the relative error to propagate; infinite if the second side has other integers, or nothing."""
        found = self.measured.get(slot)
        return math.inf if found is None or found.changed else found.relative

    def rms(self, slot: int) -> float:
        return self.measured[slot].rms if slot in self.measured else 0.0

    def flushed(self, slot: int) -> bool:
        """Whether values became zero because they are below the format's range."""
        found = self.measured.get(slot)
        return found is not None and found.lost_share >= LOST and found.rms < self.flushed_below

    def subnormal(self, slot: int) -> bool:
        """Whether typical values are in the format's subnormal range, with fewer bits."""
        return 0 < self.rms(slot) < self.flushed_below / SPREAD


@dataclass(slots=True)
class _Sources:
    """Inputs of a piece of code so far: their largest error, and their largest typical magnitude."""

    error: float = 0.0
    rms: float = 0.0


class ExpectedErrors:
    """Walks through a forward pass in order, and back along the gradients (in ``order``).

    ``noise``: of gradients, between two runs of the first side. ``harmless``: slots whose values differ without
    consequence. ``spots`` are the locations found, each with the tensor and the module whose code made it.
    """

    def __init__(
        self,
        outline: PassOutline,
        forward: PassComparisons,
        backward: PassComparisons,
        order: Sequence[int],
        only_b: Sequence[ModuleCall],
        noise: float,
        harmless: Collection[int],
    ) -> None:
        self._outline, self._forward, self._backward = outline, forward, backward
        self.harmless = harmless
        self._is_stable = True  # whether two runs of the first side agree up to rounding so far
        # The callers of modules that only the second side runs.
        self._only_in_b = {(call.parent.name, call.parent.number): call.label for call in only_b if call.parent}
        self._sources = {call.index: _Sources() for call in outline.calls}
        self._found: dict[tuple[int, str], list[ComparedTensor]] = {}  # by call, and by role: given, returned
        self._gradients: dict[int, ComparedTensor] = {}
        self.spots: list[tuple[ErrorLocation, TensorEvent, ModuleCall]] = []
        for event in outline.events:
            self._visit(event)
        self._visit_backward(order, noise)

    def rows(self) -> Iterator[ModuleRow]:
        """Yield a row for each call of the first side; ``only`` marks calls that the second side lacks."""
        counts = Counter(call.name for call in self._outline.calls)
        returned: dict[int, list[int]] = {}
        for event in self._outline.events:
            if event.role == RETURNED:
                returned.setdefault(event.call.index, []).append(event.slot)
        for call in self._outline.calls[1:]:
            slots = returned.get(call.index, [])
            yield ModuleRow(
                name=call.name,
                kind=call.kind,
                call=call.number,
                calls=counts[call.name],
                depth=call.depth - 1,
                is_leaf=not call.has_modules,
                outputs=tuple(self._found.get((call.index, RETURNED), ())),
                inputs=tuple(self._found.get((call.index, GIVEN), ())),
                gradients=tuple(self._gradients[slot] for slot in slots if slot in self._gradients),
                only="" if not slots or (call.index, RETURNED) in self._found else "a",
            )

    @property
    def returned(self) -> list[ComparedTensor]:
        """Comparisons of what the function itself returned."""
        return self._found.get((0, RETURNED), [])

    # Forward

    def _visit(self, event: TensorEvent) -> None:
        call, slot, maker = event.call, event.slot, event.call.maker(event.role)
        known = self._known_error(maker)
        compared = self._forward.compared(slot, event.path, known, event.ops)
        # A module's input gets a row only if code between modules made it.
        if compared is not None and (event.is_new or event.role == RETURNED):
            shown = compared if event.is_new else replace(compared, own=None)  # no expectation for this place
            self._found.setdefault((call.index, event.role), []).append(shown)
        self._is_stable &= (compared is None or not compared.unsteady) and self._forward.floors.get(slot) != math.inf
        error, rms = self._error(slot), self._forward.rms(slot)
        one_sided = self._runs_on_one_side(event, known)
        if one_sided:
            # It is attributed to the caller of the missing module, or to the module that calls an extra one.
            is_absent = slot not in self._forward.measured
            at = event._replace(role=GIVEN if is_absent else RETURNED)
            self._add_spot(at, ComparedTensor(why_not=one_sided, given=known))
            error = math.inf
        elif compared is not None and event.is_new and compared.beyond and slot not in self.harmless:
            self._add_spot(event, compared)
        for receiver in (call if event.role == GIVEN or call.parent is None else None, call.parent):
            if receiver is not None:
                sources = self._sources[receiver.index]
                sources.error, sources.rms = max(sources.error, error), max(sources.rms, rms)

    def _error(self, slot: int) -> float:
        return 0.0 if slot in self.harmless else self._forward.error(slot)

    def _known_error(self, maker: ModuleCall) -> float:
        """Return the largest error of its inputs; for code without tensor arguments, also that of its callers."""
        error = self._sources[maker.index].error
        if maker.takes_tensors or maker.parent is None:
            return error
        return max(error, self._known_error(maker.parent))

    def _runs_on_one_side(self, event: TensorEvent, known: float) -> str:
        """Say whether a module runs on one side only, with no earlier difference."""
        call, caller = event.call, event.call.parent
        if event.role == GIVEN or math.isinf(known):
            return ""
        if event.slot not in self._forward:
            is_first = caller is not None and math.isfinite(self._sources[caller.index].error)
            return "it runs only in a" if is_first else ""
        extra = self._only_in_b.get((call.name, call.number))
        return "" if extra is None else f"`{extra}` runs only in b"

    def _add_spot(self, event: TensorEvent, compared: ComparedTensor) -> None:
        if not self._is_stable:
            return
        maker = event.call.maker(event.role)
        rms, given_rms = self._forward.rms(event.slot), self._sources[maker.index].rms
        spot = ErrorLocation(
            module=maker.label,
            kind=maker.kind,
            phase=FORWARD,
            compared=compared,
            before=event.call.label if event.role == GIVEN else "",
            between=maker.has_modules,
            shrinks=given_rms / rms if rms and given_rms else None,
            flushed=self._forward.flushed(event.slot),
            subnormal=self._forward.subnormal(event.slot),
        )
        self.spots.append((spot, event, maker))

    # Backward

    def _visit_backward(self, order: Sequence[int], noise: float) -> None:
        # Derivatives are computed from the values of the forward pass.
        seen = max((self._error(slot) for slot in range(self._outline.slots)), default=0.0)
        if self._outline.kinked:
            # If values are off by ε, a share ε of them crosses a kink, which changes a norm by √ε.
            seen = max(seen, math.sqrt(seen))
        makers: dict[int, TensorEvent] = {}  # the event that first returns a slot
        receivers: dict[int, ModuleCall] = {}  # the innermost module that first receives it
        for event in self._outline.events:
            if event.role == RETURNED and event.call.parent is not None:
                makers.setdefault(event.slot, event)
            elif event.role == GIVEN and receivers.get(event.slot) in (None, event.call.parent):
                receivers[event.slot] = event.call
        for slot in order:
            made = makers.get(slot)
            compared = None if made is None else self._backward.compared(slot, made.path, seen, BACKWARD_OPS)
            if made is None or compared is None:
                continue
            self._gradients[slot] = compared
            noisy = replace(compared, floor=noise)
            # Noise beyond rounding means that the function differs from run to run.
            if noisy.beyond and not replace(noisy, given=0.0).unsteady:
                spot = ErrorLocation(
                    module=made.call.label,
                    kind=made.call.kind,
                    phase=BACKWARD,
                    compared=compared,
                    after=receivers[slot].label if slot in receivers else "",
                    flushed=self._backward.flushed(slot),
                    subnormal=self._backward.subnormal(slot),
                )
                self.spots.append((spot, made, made.call))
            seen = max(seen, compared.error)


def expected_errors(
    outline: PassOutline,
    forward: PassComparisons,
    backward: PassComparisons,
    order: Sequence[int],
    only_b: Sequence[ModuleCall],
    noise: float,
) -> ExpectedErrors:
    """Analyze the comparisons. Differing integers that no module receives matter only if something beyond follows them.

    Predictions returned beside the loss flip in any precision; a router's choice changes the path.
    """
    places: dict[int, int] = {}  # of slots, where they are first seen
    for place, event in enumerate(outline.events):
        places.setdefault(event.slot, place)
    given = {event.slot for event in outline.events if event.role == GIVEN}
    flipped = {slot for slot, each in forward.measured.items() if each.changed}
    loose = sorted(flipped - given, key=places.__getitem__)
    found = ExpectedErrors(outline, forward, backward, order, only_b, noise, loose)
    last = max((places[event.slot] for spot, event, _ in found.spots if spot.phase == FORWARD), default=-1)
    harmless = [slot for slot in loose if places[slot] > last]
    if harmless == loose:
        return found
    return ExpectedErrors(outline, forward, backward, order, only_b, noise, harmless)
