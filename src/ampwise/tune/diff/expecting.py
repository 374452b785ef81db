"""What error was to be expected where, by the model of ``evidence.compared``; and the places that are beyond it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ampwise.evidence.compared import SUMMING, Compared, Measured
from ampwise.evidence.difference import BACKWARD, FORWARD, ModuleRow, Spot
from ampwise.tune.diff.calls import GIVEN, RETURNED, Call
from ampwise.tune.diff.passes import Event, Outline

__all__ = ["Expecting", "Numbers"]

LOST = 0.05  # the share that has become zero, from which on that is what happened
BACKWARD_OPS = 16  # roundings between one gradient and the next, which nobody counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """All comparisons of a pass, by slot."""

    measured: Mapping[int, Measured]
    unlike: Mapping[int, str] = field(default_factory=dict)
    floors: Mapping[int, float] = field(default_factory=dict)
    roundoff: float = 0.0  # of both sides together
    flushed_below: float = 0.0  # typical magnitudes at which the second side's format turns values to zero

    def compared(self, slot: int, part: str, given: float, ops: int) -> Compared | None:
        """None where the second side has not got there."""
        if slot not in self.measured and slot not in self.unlike:
            return None
        return Compared(
            part=part,
            measured=self.measured.get(slot),
            why_not=self.unlike.get(slot, ""),
            given=given,
            own=self.roundoff * math.sqrt(max(ops, 1)) + SUMMING,
            floor=self.floors.get(slot),
        )

    def error(self, slot: int) -> float:
        """What it hands on; infinite where the second side has something else, or nothing."""
        found = self.measured.get(slot)
        return math.inf if found is None or found.changed else found.relative

    def rms(self, slot: int) -> float:
        return self.measured[slot].rms if slot in self.measured else 0.0

    def flushed(self, slot: int) -> bool:
        """Whether values have become zero because they lie below the format's range."""
        found = self.measured.get(slot)
        return found is not None and found.lost_share >= LOST and found.rms < self.flushed_below


@dataclass(slots=True)
class _Sources:
    """What a piece of code has got so far: its largest error, and its largest typical magnitude."""

    error: float = 0.0
    rms: float = 0.0

    def add(self, error: float, rms: float) -> None:
        self.error, self.rms = max(self.error, error), max(self.rms, rms)


class Expecting:
    """Goes through a forward pass in its order, and back along the gradients."""

    def __init__(
        self,
        outline: Outline,
        forward: Numbers,
        backward: Numbers,
        order: Sequence[int],
        only_b: Iterable[Call] = (),
    ) -> None:
        self._outline, self._forward, self._backward, self._order = outline, forward, backward, order
        # The callers of modules that only the second side runs.
        self._strangers = {(call.parent.name, call.parent.number): _label(call) for call in only_b if call.parent}
        self._sources = {call.index: _Sources() for call in outline.calls}
        self._found: dict[tuple[int, str], list[Compared]] = {}  # by call, and by what: given, returned
        self._gradients: dict[int, Compared] = {}
        self._first_place: dict[int, Event] = {}  # at which a slot is returned
        self.spots: list[tuple[Spot, str, int]] = []  # with the module whose code it is, and which call of it
        for event in outline.events:
            self._meet(event)
        self._go_back()

    def rows(self) -> Iterator[ModuleRow]:
        """One for each call that the second side has made, too."""
        counts: dict[str, int] = {}
        for call in self._outline.calls:
            counts[call.name] = counts.get(call.name, 0) + 1
        returned: dict[int, list[Event]] = {}
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
    def returned(self) -> list[Compared]:
        """What the function itself has returned."""
        return self._found.get((0, RETURNED), [])

    def floors(self) -> Iterator[tuple[str, float]]:
        """The error between two runs of the first side, by the module that returned it."""
        for event in self._outline.events:
            if event.slot in self._forward.floors:
                yield _label(event.call), self._forward.floors[event.slot]

    # Forward

    def _meet(self, event: Event) -> None:
        call, slot = event.call, event.slot
        maker = call.parent if event.role == GIVEN and call.parent is not None else call
        known = self._known_sources(maker)
        compared = self._forward.compared(slot, event.path, known, event.ops)
        self._note(event, compared)
        told = self._runs_otherwise(event, known)
        if told:
            self._add_choice(event, told, known)
        elif compared is not None and event.is_new and compared.beyond:
            self._add_spot(event, maker, compared)
        self._hand_on(event, math.inf if told else self._forward.error(slot))

    def _note(self, event: Event, compared: Compared | None) -> None:
        """For the rows. What a module is given has a place there if code between modules has made it."""
        if compared is not None and (event.is_new or event.role == RETURNED):
            shown = (
                compared if event.is_new else replace(compared, own=None)
            )  # nothing was to be expected of this place
            self._found.setdefault((event.call.index, event.role), []).append(shown)

    def _hand_on(self, event: Event, error: float) -> None:
        call, rms = event.call, self._forward.rms(event.slot)
        if event.role == GIVEN or call.parent is None:
            self._sources[call.index].add(error, rms)
        if call.parent is not None:
            self._sources[call.parent.index].add(error, rms)
        if event.role == RETURNED and call.parent is not None:
            self._first_place.setdefault(event.slot, event)

    def _known_sources(self, maker: Call) -> float:
        """The largest error that it got; of code that was handed nothing, that of what is around it."""
        error = self._sources[maker.index].error
        if maker.takes_tensors or maker.parent is None:
            return error
        return max(error, self._known_sources(maker.parent))

    def _runs_otherwise(self, event: Event, known: float) -> str:
        """Whether a module runs on one side alone, where nothing was amiss before."""
        call, around = event.call, event.call.parent
        if event.role == GIVEN or math.isinf(known):
            return ""
        if event.slot not in self._forward.measured and event.slot not in self._forward.unlike:
            is_first = around is not None and math.isfinite(self._sources[around.index].error)
            return "it runs in a alone" if is_first else ""
        stranger = self._strangers.get((call.name, call.number))
        return "" if stranger is None else f"`{stranger}` runs in b alone"

    def _add_choice(self, event: Event, told: str, known: float) -> None:
        """By the code around a module that is not there, or of the module that calls another."""
        call = event.call
        is_absent = event.slot not in self._forward.measured
        maker = call.parent if is_absent and call.parent is not None else call
        at = event._replace(role=GIVEN if is_absent else RETURNED)
        self._add_spot(at, maker, Compared(why_not=told, given=known))

    def _add_spot(self, event: Event, maker: Call, compared: Compared) -> None:
        rms, sources = self._forward.rms(event.slot), self._sources[maker.index]
        spot = Spot(
            module=_label(maker),
            kind=maker.kind,
            phase=FORWARD,
            compared=compared,
            before=_label(event.call) if event.role == GIVEN else "",
            between=maker.has_modules,
            shrinks=sources.rms / rms if rms and sources.rms else None,
            flushed=self._forward.flushed(event.slot),
        )
        self.spots.append((spot, maker.name, maker.number))

    # Backward

    def _go_back(self) -> None:
        errors = [self._forward.error(slot) for slot in range(self._outline.slots)]
        seen = max(errors, default=0.0)  # derivatives are made of what the forward pass has computed
        if self._outline.kinked:
            # Of values that are off by ε, a share of ε is taken across a kink, and √ε is what that does to a norm.
            seen = max(seen, math.sqrt(seen))
        takers = self._takers()
        for slot in self._order:
            event = self._first_place.get(slot)
            compared = self._backward.compared(slot, "" if event is None else event.path, seen, BACKWARD_OPS)
            if compared is None or event is None:
                continue
            self._gradients[slot] = compared
            if compared.beyond:
                call = event.call
                flushed = self._backward.flushed(slot)
                spot = Spot(
                    module=_label(call),
                    kind=call.kind,
                    phase=BACKWARD,
                    compared=compared,
                    after=takers.get(slot, ""),
                    flushed=flushed,
                )
                self.spots.append((spot, call.name, call.number))
            seen = max(seen, compared.error)

    def _takers(self) -> dict[int, str]:
        """By slot, the innermost module that was given it first."""
        found: dict[int, Call] = {}
        for event in self._outline.events:
            known = found.get(event.slot)
            if event.role == GIVEN and (known is None or event.call.parent is known):
                found[event.slot] = event.call
        return {slot: _label(call) for slot, call in found.items()}


def _label(call: Call) -> str:
    if call.module is None:
        return call.kind
    return f"{call.name or call.kind}{f' (call {call.number + 1})' if call.number else ''}"
