"""The training step: the loops in which gradients are made and applied, and what state they are in on the way.

A ``Region`` is the body of the innermost loop that holds both a backward and the step that follows it (or a
whole function, when there is no loop). Its paths are walked with a little state machine; a ``Moment`` is one
event on one path with the state just before it. Rules ask of an event what holds at all its moments, or at
some: comparing paths, not line numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ampwise.source.calls import ANYTHING
from ampwise.source.events import Block, Event, Guard, Kind, Loop
from ampwise.source.paths import Path, paths_through
from ampwise.source.precision import Autocast
from ampwise.source.walk import Trace, events_in

__all__ = ["STEPS", "Moment", "Region", "regions_of"]

BACKWARDS = (Kind.BACKWARD, Kind.SCALED_BACKWARD)
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
        return (event for event in self.path.events[self.index + 1 :] if event.kind in kinds)

    def earlier(self, *kinds: str) -> Iterator[Event]:
        """What came before on this path, the latest first."""
        return (event for event in reversed(self.path.events[: self.index]) if event.kind in kinds)

    @property
    def surely_scaled(self) -> bool:
        """Scaled gradients, and nothing seen that could have unscaled them."""
        return bool(self.scaled) and not self.unscaled and not self.opaque


class Region:
    """One training step, with all the ways through it."""

    def __init__(self, trace: Trace, loop: Loop | None) -> None:
        self.trace = trace
        self.loop = loop

    @property
    def block(self) -> Block:
        return self.loop.block if self.loop else self.trace.block

    @functools.cached_property
    def events(self) -> list[Event]:
        return list(events_in(self.block))

    @functools.cached_property
    def paths(self) -> list[Path]:
        """The paths; none when there are too many to tell anything."""
        return paths_through(self.block) or []

    @functools.cached_property
    def moments(self) -> list[Moment]:
        return [moment for path in self.paths for moment in _moments(path)]

    def visits(self, *kinds: str) -> Iterator[tuple[Event, list[Moment]]]:
        """Each event of these kinds with its moments on all paths, in source order."""
        by_event: dict[Event, list[Moment]] = {}
        for moment in self.moments:
            if moment.event.kind in kinds:
                by_event.setdefault(moment.event, []).append(moment)
        yield from sorted(by_event.items(), key=lambda item: (item[0].line, item[0].node.col_offset))

    def has(self, *kinds: str) -> bool:
        return any(event.kind in kinds for event in self.events)

    @functools.cached_property
    def autocasts(self) -> list[Autocast]:
        """The autocast regions entered in the step that may be on, each once."""
        sites = (site for site in self.trace.statements if self.loop is None or self.loop in site.context.loops)
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
        return event.context.guards[self._guards_outside(event) :]

    def _guards_outside(self, event: Event) -> int:
        if self.loop is None:
            return 0
        # The loop's own guards are those that every event in it shares from the start.
        first = self.events[0].context.guards
        shared = 0
        for mine, other in zip(event.context.guards, first, strict=False):
            if mine != other or any(_guards(seen, shared) != mine for seen in self.events):
                break
            shared += 1
        return shared


def _guards(event: Event, index: int) -> Guard | None:
    return event.context.guards[index] if index < len(event.context.guards) else None


def regions_of(trace: Trace) -> list[Region]:
    """The training steps a trace goes through, in order."""
    events = list(trace.events())
    found: dict[Loop | None, None] = {}
    for event in events:
        if event.kind in STEPS or event.kind in BACKWARDS or event.kind == Kind.UPDATE:
            found.setdefault(_home(event, trace))
    return [Region(trace, loop) for loop in found]


def _home(event: Event, trace: Trace) -> Loop | None:
    """The innermost loop around ``event`` that holds both a backward and a step."""
    for loop in reversed(event.context.loops):
        kinds = {inner.kind for inner in events_in(loop.block)}
        hidden = any(ANYTHING in inner.keys for inner in events_in(loop.block))
        makes, applies = hidden or kinds & {*BACKWARDS}, hidden or kinds & {*STEPS}
        if makes and applies:
            return loop
    if event.kind in BACKWARDS and event.context.loops:
        return event.context.loops[-1]  # gradients made and, as far as we see, never applied
    return None


def _moments(path: Path) -> Iterator[Moment]:
    state = Moment(event=None, path=path, index=0)  # type: ignore[arg-type]
    for index, event in enumerate(path.events):
        yield Moment(
            event,
            path,
            index,
            dict(state.scaled),
            state.plain,
            dict(state.unscaled),
            dict(state.stepped),
            dict(state.updated),
            state.opaque,
        )
        _advance(state, event)


def _advance(state: Moment, event: Event) -> None:
    """The state after an event."""
    kind = event.kind
    if kind == Kind.SCALED_BACKWARD:
        state.scaled[event.key or ""] = event
        state.stepped.clear()
        state.updated.clear()
    elif kind == Kind.BACKWARD:
        state.plain = event
        state.stepped.clear()
        state.updated.clear()
    elif kind == Kind.UNSCALE:
        state.unscaled[(event.key, event.other)] = event
    elif kind == Kind.SCALER_STEP:
        state.stepped[event.other] = event
    elif kind == Kind.OPTIMIZER_STEP:
        state.stepped[event.key] = event
    elif kind == Kind.UPDATE:
        state.scaled.pop(event.key or "", None)
        state.unscaled.clear()
        state.opaque = False
        state.updated[event.key] = event
    elif kind == Kind.ZERO_GRAD:
        state.scaled.clear()
        state.plain = None
    elif kind == Kind.OPAQUE:
        state.opaque = True
