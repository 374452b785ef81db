"""What error was to be expected where, by the model of ``evidence.compared``; and the places that are beyond it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ampwise.evidence.compared import SUMMING, Compared, Measured
from ampwise.evidence.difference import BACKWARD, FORWARD, ModuleRow, Spot
from ampwise.tune.diff.calls import GIVEN, RETURNED, Call
from ampwise.tune.diff.passes import Event, Outline
from ampwise.tune.diff.side import SPREAD

__all__ = ["Expecting", "Numbers", "expecting_of"]

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

    def subnormal(self, slot: int) -> bool:
        """Whether typical values lie where the format has fewer bits."""
        found = self.measured.get(slot)
        return found is not None and 0 < found.rms < self.flushed_below / SPREAD


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
        *,
        noise: float = 0.0,
        harmless: Collection[int] = (),
    ) -> None:
        self._outline, self._forward, self._backward, self._order = outline, forward, backward, order
        self._noise = noise  # of gradients, between two runs of the first side
        self.harmless = harmless  # slots whose values are others, of which nothing follows
        self._is_steady = True  # so far, two runs of the first side are the same but for rounding
        # The callers of modules that only the second side runs.
        self._strangers = {(call.parent.name, call.parent.number): _label(call) for call in only_b if call.parent}
        self._sources = {call.index: _Sources() for call in outline.calls}
        self._found: dict[tuple[int, str], list[Compared]] = {}  # by call, and by what: given, returned
        self._gradients: dict[int, Compared] = {}
        self._first_place: dict[int, Event] = {}  # at which a slot is returned
        self.spots: list[tuple[Spot, Event, Call]] = []  # with the tensor, and the module whose code has made it
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

    def maker_of(self, slot: int) -> str:
        """What returned a tensor first."""
        return next(_label(event.call) for event in self._outline.events if event.slot == slot)

    # Forward

    def _meet(self, event: Event) -> None:
        call, slot = event.call, event.slot
        maker = call.parent if event.role == GIVEN and call.parent is not None else call
        known = self._known_sources(maker)
        compared = self._forward.compared(slot, event.path, known, event.ops)
        self._note(event, compared)
        self._is_steady &= (compared is None or not compared.unsteady) and self._forward.floors.get(slot) != math.inf
        told = self._runs_otherwise(event, known)
        if told:
            self._add_choice(event, told, known)
        elif compared is not None and event.is_new and compared.beyond and slot not in self.harmless:
            self._add_spot(event, maker, compared)
        self._hand_on(event, math.inf if told else self._error(slot))

    def _error(self, slot: int) -> float:
        return 0.0 if slot in self.harmless else self._forward.error(slot)

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
        if not self._is_steady:
            return
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
            subnormal=self._forward.subnormal(event.slot),
        )
        self.spots.append((spot, event, maker))

    # Backward

    def _go_back(self) -> None:
        errors = [self._error(slot) for slot in range(self._outline.slots)]
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
            if self._is_beyond_noise(compared):
                call = event.call
                spot = Spot(
                    module=_label(call),
                    kind=call.kind,
                    phase=BACKWARD,
                    compared=compared,
                    after=takers.get(slot, ""),
                    flushed=self._backward.flushed(slot),
                    subnormal=self._backward.subnormal(slot),
                )
                self.spots.append((spot, event, call))
            seen = max(seen, compared.error)

    def _is_beyond_noise(self, compared: Compared) -> bool:
        """Of a gradient. Noise that no rounding explains says that it is another function each time."""
        noisy = replace(compared, floor=self._noise)
        return noisy.beyond and not replace(noisy, given=0.0).unsteady

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


def expecting_of(
    outline: Outline, forward: Numbers, backward: Numbers, order: Sequence[int], only_b: Iterable[Call], noise: float
) -> Expecting:
    """Whole numbers that are others, and that no module is given, matter if something beyond comes after them.

    Predictions that a function returns beside its loss flip in any precision; what a router chooses leads elsewhere.
    """
    only_b = tuple(only_b)
    loose = _loose_flips(outline, forward)
    found = Expecting(outline, forward, backward, order, only_b, noise=noise, harmless=loose)
    places = {event.slot: place for place, event in enumerate(outline.events) if event.is_new}
    last = max((places[event.slot] for spot, event, _ in found.spots if spot.phase == FORWARD), default=-1)
    harmless = {slot for slot, place in loose.items() if place > last}
    if len(harmless) == len(loose):
        return found
    return Expecting(outline, forward, backward, order, only_b, noise=noise, harmless=harmless)


def _loose_flips(outline: Outline, forward: Numbers) -> dict[int, int]:
    """Slots of whole numbers that are others and that no module is given, and where they come first."""
    given = {event.slot for event in outline.events if event.role == GIVEN}
    flipped = {slot for slot, each in forward.measured.items() if each.changed} - given
    found: dict[int, int] = {}
    for place, event in enumerate(outline.events):
        if event.slot in flipped:
            found.setdefault(event.slot, place)
    return found
