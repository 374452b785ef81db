"""The training step: the loops in which gradients are made and applied, and what state they are in on the way.

A ``Region`` is the body of the innermost loop that holds both a backward and the step that follows it (or a
whole function, when there is no loop). Its paths are walked with a little state machine; a ``Moment`` is one
event on one path with the state just before it. Rules ask of an event what holds at all its moments, or at
some: comparing paths, not line numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ampwise.finding import Place
from ampwise.source.calls import ANYTHING
from ampwise.source.events import Block, Event, Guard, Kind, Loop
from ampwise.source.paths import Path, paths_through
from ampwise.source.precision import Autocast
from ampwise.source.walk import Budget, Trace, events_in

__all__ = ["STEPS", "Moment", "Region", "regions_of"]

BACKWARDS = (Kind.BACKWARD, Kind.SCALED_BACKWARD)
MOST_ON_PATHS = 50_000  # events on the paths of one file, each counted on every path
STEPS = (Kind.SCALER_STEP, Kind.OPTIMIZER_STEP)


class Moment:
    """An event on a path, and how things stood when it came."""

    __slots__ = ("event", "index", "opaque", "path", "plain", "scaled", "stepped", "unscaled", "updated")

    def __init__(
        self,
        event: Event,
        path: Path,
        index: int,
        scaled: dict[str, Event] | None = None,
        plain: Event | None = None,
        unscaled: dict[tuple[str | None, str | None], Event] | None = None,
        stepped: dict[str | None, Event] | None = None,
        updated: dict[str | None, Event] | None = None,
        opaque: bool = False,
    ) -> None:
        self.event = event
        self.path = path
        self.index = index
        self.scaled = {} if scaled is None else scaled  # scalers whose scaled gradients are there
        self.plain = plain  # a backward without a scaler, not yet applied
        self.unscaled = {} if unscaled is None else unscaled  # since the last update
        self.stepped = {} if stepped is None else stepped  # optimizers applied since the last backward
        self.updated = {} if updated is None else updated  # scalers updated since the last backward
        self.opaque = opaque  # a function that we cannot see was given a scaler since the last update

    def later(self, *kinds: str) -> Iterator[Event]:
        """What still comes on this path."""
        return self.path.after(self.index, kinds)

    def earlier(self, *kinds: str) -> Iterator[Event]:
        """What came before on this path, the latest first."""
        return self.path.before(self.index, kinds)

    @property
    def surely_scaled(self) -> bool:
        """Scaled gradients, and nothing seen that could have unscaled them."""
        return bool(self.scaled) and not self.unscaled and not self.opaque


class Region:
    """One training step, with all the ways through it."""

    def __init__(self, trace: Trace, loop: Loop | None, budget: Budget | None = None) -> None:
        self.trace = trace
        self.loop = loop
        self.budget = budget or Budget(MOST_ON_PATHS)
        self.given_up: list[Region] = []  # where the regions are noted whose paths were asked for in vain

    @property
    def place(self) -> Place:
        """Where the loop, or without one the function, begins."""
        function = self.trace.frame.function
        return self.loop.frame.outline.script.place(self.loop.node) if self.loop else function.place

    @property
    def block(self) -> Block:
        return self.loop.block if self.loop else self.trace.block

    @functools.cached_property
    def events(self) -> list[Event]:
        return list(events_in(self.block))

    @property
    def paths(self) -> list[Path]:
        """The paths; none when there are too many to tell anything."""
        if self._paths is None:
            self.given_up.append(self)
        return self._paths or []

    @functools.cached_property
    def _paths(self) -> list[Path] | None:
        found = paths_through(self.block)
        events = sum(len(path.events) for path in found or ())
        if events > self.budget.left:
            return None
        self.budget.left -= events
        return found

    @functools.cached_property
    def moments(self) -> dict[Event, list[Moment]]:
        """The moments of each event, on all paths."""
        found: dict[Event, list[Moment]] = {}
        for path in self.paths:
            for moment in _moments(path):
                found.setdefault(moment.event, []).append(moment)
        return found

    def visits(self, *kinds: str) -> Iterator[tuple[Event, list[Moment]]]:
        """Each event of these kinds with its moments on all paths, in source order."""
        if not self.has(*kinds):
            return
        asked = [item for item in self.moments.items() if item[0].kind in kinds]
        yield from sorted(asked, key=lambda item: (item[0].line, item[0].node.col_offset))

    def has(self, *kinds: str) -> bool:
        return not self.kinds.isdisjoint(kinds)

    @functools.cached_property
    def kinds(self) -> set[str]:
        return {event.kind for event in self.events}

    @functools.cached_property
    def autocasts(self) -> list[Autocast]:
        """The autocast regions entered in the step that may be on, each once."""
        sites = self.trace.statements_in(self.loop)
        found = {autocast.node: autocast for site in sites for autocast in site.context.autocasts}
        return [autocast for autocast in found.values() if autocast.may_be_on]

    @functools.cached_property
    def hidden(self) -> bool:
        """Whether a framework, or a function we cannot see, may do part of the step."""
        return any(event.kind == Kind.OPAQUE and ANYTHING in event.keys for event in self.events)

    @functools.cached_property
    def boundary(self) -> Guard | None:
        """The test for the end of an accumulation window, when steps are taken only there."""
        for event in self.events:
            if event.kind in STEPS:
                for guard in self.own_guards(event):
                    if guard.boundary is not None and guard.holds:
                        return guard
        return None

    def own_guards(self, event: Event) -> tuple[Guard, ...]:
        """The guards of an event that lie inside the region."""
        return event.context.guards[self._guards_outside :]

    @functools.cached_property
    def _guards_outside(self) -> int:
        """How many guards are the loop's own: those that every event in it shares from the start."""
        if self.loop is None:
            return 0
        shared = self.events[0].context.guards
        for event in self.events:
            pairs = enumerate(zip(shared, event.context.guards, strict=False))
            differ = next((index for index, (mine, other) in pairs if mine != other), len(event.context.guards))
            shared = shared[:differ]
        return len(shared)


def regions_of(trace: Trace, budget: Budget | None = None) -> list[Region]:
    """The training steps a trace goes through, in order; ``budget`` is what is left for events on paths."""
    whole: dict[Loop, bool] = {}
    found: dict[Loop | None, None] = {}
    for event in trace.events():
        if event.kind in STEPS or event.kind in BACKWARDS or event.kind == Kind.UPDATE:
            found.setdefault(_home(event, whole))
    return [Region(trace, loop, budget) for loop in found]


def _home(event: Event, whole: dict[Loop, bool]) -> Loop | None:
    """The innermost loop around ``event`` that holds both a backward and a step; ``whole`` is what is known so far."""
    for loop in reversed(event.context.loops):
        if loop not in whole:
            whole[loop] = _makes_and_applies(list(events_in(loop.block)))
        if whole[loop]:
            return loop
    if event.kind in BACKWARDS and event.context.loops:
        return event.context.loops[-1]  # gradients made and, as far as we see, never applied
    return None


def _makes_and_applies(events: list[Event]) -> bool:
    kinds = {event.kind for event in events}
    hidden = any(ANYTHING in event.keys for event in events)
    return hidden or bool(kinds & {*BACKWARDS} and kinds & {*STEPS})


def _moments(path: Path) -> Iterator[Moment]:
    state = Moment(event=None, path=path, index=0)  # type: ignore[arg-type]
    for index, event in enumerate(path.events):
        yield Moment(
            event,
            path,
            index,
            state.scaled,
            state.plain,
            state.unscaled,
            state.stepped,
            state.updated,
            state.opaque,
        )
        _advance(state, event)


def _advance(state: Moment, event: Event) -> None:
    """The state after an event: new dictionaries for those that change, since moments share them."""
    kind = event.kind
    if kind == Kind.SCALED_BACKWARD:
        state.scaled = {**state.scaled, event.key or "": event}
        state.stepped, state.updated = {}, {}
    elif kind == Kind.BACKWARD:
        state.plain = event
        state.stepped, state.updated = {}, {}
    elif kind == Kind.UNSCALE:
        state.unscaled = {**state.unscaled, (event.key, event.other): event}
    elif kind == Kind.SCALER_STEP:
        state.stepped = {**state.stepped, event.other: event}
    elif kind == Kind.OPTIMIZER_STEP:
        state.stepped = {**state.stepped, event.key: event}
    elif kind == Kind.UPDATE:
        state.scaled = {key: made for key, made in state.scaled.items() if key != (event.key or "")}
        state.unscaled, state.opaque = {}, False
        state.updated = {**state.updated, event.key: event}
    elif kind == Kind.ZERO_GRAD:
        state.scaled, state.plain = {}, None
    elif kind == Kind.OPAQUE:
        state.opaque = True
