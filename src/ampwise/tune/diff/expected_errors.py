"""Expected rounding errors, by the model of ``evidence.compared``, and the places that exceed them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ampwise.tune.diff.module_calls import GIVEN, RETURNED, ModuleCall
from ampwise.tune.diff.passes import PassOutline, TensorEvent
from ampwise.tune.diff.side import SPREAD
from ampwise.tune.diff.step_difference import BACKWARD, FORWARD, ErrorLocation, ModuleRow
from ampwise.tune.diff.tensor_difference import SUMMING, ComparedTensor, TensorDifference

__all__ = ["ExpectedErrors", "PassComparisons", "expected_errors"]

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

    def compared(self, slot: int, part: str, given: float, ops: int) -> ComparedTensor | None:
        """Return the comparison of a slot; None if the second side has no such tensor."""
        if slot not in self.measured and slot not in self.unlike:
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
        found = self.measured.get(slot)
        return found is not None and 0 < found.rms < self.flushed_below / SPREAD


@dataclass(slots=True)
class _Sources:
    """Inputs of a piece of code so far: their largest error, and their largest typical magnitude."""

    error: float = 0.0
    rms: float = 0.0

    def add(self, error: float, rms: float) -> None:
        self.error, self.rms = max(self.error, error), max(self.rms, rms)


class ExpectedErrors:
    """Walks through a forward pass in order, and back along the gradients."""

    def __init__(
        self,
        outline: PassOutline,
        forward: PassComparisons,
        backward: PassComparisons,
        order: Sequence[int],
        only_b: Iterable[ModuleCall] = (),
        *,
        noise: float = 0.0,
        harmless: Collection[int] = (),
    ) -> None:
        self._outline, self._forward, self._backward, self._order = outline, forward, backward, order
        self._noise = noise  # of gradients, between two runs of the first side
        self.harmless = harmless  # slots whose values differ without consequence
        self._is_stable = True  # whether two runs of the first side agree up to rounding so far
        # The callers of modules that only the second side runs.
        self._only_in_b = {(call.parent.name, call.parent.number): _label(call) for call in only_b if call.parent}
        self._sources = {call.index: _Sources() for call in outline.calls}
        self._found: dict[tuple[int, str], list[ComparedTensor]] = {}  # by call, and by role: given, returned
        self._gradients: dict[int, ComparedTensor] = {}
        self._first_place: dict[int, TensorEvent] = {}  # the event that first returns a slot
        self.spots: list[
            tuple[ErrorLocation, TensorEvent, ModuleCall]
        ] = []  # with the tensor, and the module whose code made it
        for event in outline.events:
            self._visit(event)
        self._visit_backward()

    def rows(self) -> Iterator[ModuleRow]:
        """Yield a row for each call of the first side; ``only`` marks calls that the second side lacks."""
        counts: dict[str, int] = {}
        for call in self._outline.calls:
            counts[call.name] = counts.get(call.name, 0) + 1
        returned: dict[int, list[TensorEvent]] = {}
        for event in self._outline.events:
            if event.role == RETURNED:
                returned.setdefault(event.call.index, []).append(event)
        for call in self._outline.calls[1:]:
            events = returned.get(call.index, [])
            yield ModuleRow(
                name=call.name,
                kind=call.kind,
                call=call.number,
                calls=counts[call.name],
                depth=call.depth - 1,
                is_leaf=not call.has_modules,
                outputs=tuple(self._found.get((call.index, RETURNED), ())),
                inputs=tuple(self._found.get((call.index, GIVEN), ())),
                gradients=tuple(self._gradients[event.slot] for event in events if event.slot in self._gradients),
                only="" if not events or (call.index, RETURNED) in self._found else "a",
            )

    @property
    def returned(self) -> list[ComparedTensor]:
        """Comparisons of what the function itself returned."""
        return self._found.get((0, RETURNED), [])

    def floors(self) -> Iterator[tuple[str, float]]:
        """Yield the errors between two runs of the first side, with the module that returned the tensor."""
        for event in self._outline.events:
            if event.slot in self._forward.floors:
                yield _label(event.call), self._forward.floors[event.slot]

    def maker_of(self, slot: int) -> str:
        """Return the module that first returned a tensor."""
        return next(_label(event.call) for event in self._outline.events if event.slot == slot)

    # Forward

    def _visit(self, event: TensorEvent) -> None:
        call, slot = event.call, event.slot
        maker = call.parent if event.role == GIVEN and call.parent is not None else call
        known = self._known_sources(maker)
        compared = self._forward.compared(slot, event.path, known, event.ops)
        self._note(event, compared)
        self._is_stable &= (compared is None or not compared.unsteady) and self._forward.floors.get(slot) != math.inf
        only_one_side = self._runs_on_one_side(event, known)
        if only_one_side:
            self._add_choice(event, only_one_side, known)
        elif compared is not None and event.is_new and compared.beyond and slot not in self.harmless:
            self._add_spot(event, maker, compared)
        self._propagate(event, math.inf if only_one_side else self._error(slot))

    def _error(self, slot: int) -> float:
        return 0.0 if slot in self.harmless else self._forward.error(slot)

    def _note(self, event: TensorEvent, compared: ComparedTensor | None) -> None:
        """Store for the rows. A module's input gets one only if code between modules made it."""
        if compared is not None and (event.is_new or event.role == RETURNED):
            shown = compared if event.is_new else replace(compared, own=None)  # no expectation for this place
            self._found.setdefault((event.call.index, event.role), []).append(shown)

    def _propagate(self, event: TensorEvent, error: float) -> None:
        call, rms = event.call, self._forward.rms(event.slot)
        if event.role == GIVEN or call.parent is None:
            self._sources[call.index].add(error, rms)
        if call.parent is not None:
            self._sources[call.parent.index].add(error, rms)
        if event.role == RETURNED and call.parent is not None:
            self._first_place.setdefault(event.slot, event)

    def _known_sources(self, maker: ModuleCall) -> float:
        """Return the largest error of its inputs; for code without tensor arguments, also that of its callers."""
        error = self._sources[maker.index].error
        if maker.takes_tensors or maker.parent is None:
            return error
        return max(error, self._known_sources(maker.parent))

    def _runs_on_one_side(self, event: TensorEvent, known: float) -> str:
        """Say whether a module runs on one side only, with no earlier difference."""
        call, caller = event.call, event.call.parent
        if event.role == GIVEN or math.isinf(known):
            return ""
        if event.slot not in self._forward.measured and event.slot not in self._forward.unlike:
            is_first = caller is not None and math.isfinite(self._sources[caller.index].error)
            return "it runs only in a" if is_first else ""
        extra = self._only_in_b.get((call.name, call.number))
        return "" if extra is None else f"`{extra}` runs only in b"

    def _add_choice(self, event: TensorEvent, only_one_side: str, known: float) -> None:
        """Attribute it to the caller of the missing module, or to the module that calls an extra one."""
        call = event.call
        is_absent = event.slot not in self._forward.measured
        maker = call.parent if is_absent and call.parent is not None else call
        at = event._replace(role=GIVEN if is_absent else RETURNED)
        self._add_spot(at, maker, ComparedTensor(why_not=only_one_side, given=known))

    def _add_spot(self, event: TensorEvent, maker: ModuleCall, compared: ComparedTensor) -> None:
        if not self._is_stable:
            return
        rms, sources = self._forward.rms(event.slot), self._sources[maker.index]
        spot = ErrorLocation(
            module=_label(maker),
            kind=maker.kind,
            phase=FORWARD,
            compared=compared,
            before=_label(event.call) if event.role == GIVEN else "",
            between=maker.has_modules,
            shrinks=sources.rms / rms if rms and sources.rms else None,
            flushed=self._forward.flushed(event.slot),
            subnormal=self._forward.subnormal(event.slot),
        )
        self.spots.append((spot, event, maker))

    # Backward

    def _visit_backward(self) -> None:
        errors = [self._error(slot) for slot in range(self._outline.slots)]
        seen = max(errors, default=0.0)  # derivatives are computed from the values of the forward pass
        if self._outline.kinked:
            # If values are off by ε, a share ε of them crosses a kink, which changes a norm by √ε.
            seen = max(seen, math.sqrt(seen))
        receivers = self._receivers()
        for slot in self._order:
            event = self._first_place.get(slot)
            compared = self._backward.compared(slot, "" if event is None else event.path, seen, BACKWARD_OPS)
            if compared is None or event is None:
                continue
            self._gradients[slot] = compared
            if self._is_beyond_noise(compared):
                call = event.call
                spot = ErrorLocation(
                    module=_label(call),
                    kind=call.kind,
                    phase=BACKWARD,
                    compared=compared,
                    after=receivers.get(slot, ""),
                    flushed=self._backward.flushed(slot),
                    subnormal=self._backward.subnormal(slot),
                )
                self.spots.append((spot, event, call))
            seen = max(seen, compared.error)

    def _is_beyond_noise(self, compared: ComparedTensor) -> bool:
        """Whether a gradient exceeds its noise. Noise beyond rounding means the function differs from run to run."""
        noisy = replace(compared, floor=self._noise)
        return noisy.beyond and not replace(noisy, given=0.0).unsteady

    def _receivers(self) -> dict[int, str]:
        """Return the innermost module that first received each slot."""
        found: dict[int, ModuleCall] = {}
        for event in self._outline.events:
            known = found.get(event.slot)
            if event.role == GIVEN and (known is None or event.call.parent is known):
                found[event.slot] = event.call
        return {slot: _label(call) for slot, call in found.items()}


def _label(call: ModuleCall) -> str:
    if call.module is None:
        return call.kind
    return f"{call.name or call.kind}{f' (call {call.number + 1})' if call.number else ''}"


def expected_errors(
    outline: PassOutline,
    forward: PassComparisons,
    backward: PassComparisons,
    order: Sequence[int],
    only_b: Iterable[ModuleCall],
    noise: float,
) -> ExpectedErrors:
    """Analyze the comparisons. Differing integers that no module receives matter only if something beyond follows them.

    Predictions returned beside the loss flip in any precision; a router's choice changes the path.
    """
    only_b = tuple(only_b)
    loose = _loose_flips(outline, forward)
    found = ExpectedErrors(outline, forward, backward, order, only_b, noise=noise, harmless=loose)
    places = {event.slot: place for place, event in enumerate(outline.events) if event.is_new}
    last = max((places[event.slot] for spot, event, _ in found.spots if spot.phase == FORWARD), default=-1)
    harmless = {slot for slot, place in loose.items() if place > last}
    if len(harmless) == len(loose):
        return found
    return ExpectedErrors(outline, forward, backward, order, only_b, noise=noise, harmless=harmless)


def _loose_flips(outline: PassOutline, forward: PassComparisons) -> dict[int, int]:
    """Return slots of differing integers that no module receives, and their first positions."""
    given = {event.slot for event in outline.events if event.role == GIVEN}
    flipped = {slot for slot, each in forward.measured.items() if each.changed} - given
    found: dict[int, int] = {}
    for place, event in enumerate(outline.events):
        if event.slot in flipped:
            found.setdefault(event.slot, place)
    return found
