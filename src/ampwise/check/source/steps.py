"""Training steps: the loops in which gradients are computed and applied, and the state of the gradients on each path.

A ``Region`` is the body of the innermost loop that contains both a backward and the step that follows it (or a
whole function, if there is no loop). A small state machine follows its paths; a ``Moment`` is one event on one
path with the state just before it. Rules check what holds at all moments of an event, or at some of them: they
compare paths, not line numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ampwise.check.source.call_events import ANYTHING
from ampwise.check.source.events import BranchGuard, EventBlock, EventKind, Loop, SourceEvent
from ampwise.check.source.execution_paths import ExecutionPath, paths_through
from ampwise.check.source.precision import AutocastContext
from ampwise.check.source.walk import CodeTrace, WorkBudget, events_in
from ampwise.finding import Place

__all__ = ["STEPS", "Moment", "Region", "regions_of", "surely_scaled"]

BACKWARDS = (EventKind.BACKWARD, EventKind.SCALED_BACKWARD)
MOST_ON_PATHS = 50_000  # events on the paths of one file, each counted on every path
STEPS = (EventKind.SCALER_STEP, EventKind.OPTIMIZER_STEP)


class Moment:
    """Event on a path, with the state just before it."""

    __slots__ = ("event", "index", "opaque", "path", "plain", "scaled", "stepped", "unscaled", "updated")

    def __init__(
        self,
        event: SourceEvent,
        path: ExecutionPath,
        index: int,
        scaled: dict[str, SourceEvent] | None = None,
        plain: SourceEvent | None = None,
        unscaled: dict[tuple[str | None, str | None], SourceEvent] | None = None,
        stepped: dict[str | None, SourceEvent] | None = None,
        updated: dict[str | None, SourceEvent] | None = None,
        opaque: bool = False,
    ) -> None:
        self.event = event
        self.path = path
        self.index = index
        self.scaled = {} if scaled is None else scaled  # scalers with scaled gradients
        self.plain = plain  # a backward without a scaler, not yet applied
        self.unscaled = {} if unscaled is None else unscaled  # since the last update
        self.stepped = {} if stepped is None else stepped  # optimizers applied since the last backward
        self.updated = {} if updated is None else updated  # scalers updated since the last backward
        self.opaque = opaque  # a function we cannot follow got a scaler since the last update

    def later(self, *kinds: str) -> Iterator[SourceEvent]:
        """Yield the later events of these kinds on this path."""
        return self.path.after(self.index, kinds)

    def earlier(self, *kinds: str) -> Iterator[SourceEvent]:
        """Yield the earlier events of these kinds on this path, the latest first."""
        return self.path.before(self.index, kinds)

    @property
    def backward(self) -> SourceEvent:
        """First backward whose scaled gradients are not yet applied."""
        return next(iter(self.scaled.values()))

    @property
    def surely_scaled(self) -> bool:
        """Whether gradients are certainly scaled: nothing can have unscaled them."""
        return bool(self.scaled) and not self.unscaled and not self.opaque


class Region:
    """One training step, with all paths through it."""

    def __init__(self, trace: CodeTrace, loop: Loop | None, budget: WorkBudget | None = None) -> None:
        self.trace = trace
        self.loop = loop
        self.budget = budget or WorkBudget(MOST_ON_PATHS)
        self.given_up: list[Region] = []  # collects regions whose paths were needed but are too many

    @property
    def place(self) -> Place:
        """Place where the loop begins or, without a loop, the function."""
        function = self.trace.frame.function
        return self.loop.frame.outline.script.place(self.loop.node) if self.loop else function.place

    @property
    def block(self) -> EventBlock:
        return self.loop.block if self.loop else self.trace.block

    @functools.cached_property
    def events(self) -> list[SourceEvent]:
        return list(events_in(self.block))

    @property
    def paths(self) -> list[ExecutionPath]:
        """Paths through the step; empty if there are too many."""
        if self._paths is None:
            self.given_up.append(self)
        return self._paths or []

    @functools.cached_property
    def _paths(self) -> list[ExecutionPath] | None:
        found = paths_through(self.block)
        events = sum(len(path.events) for path in found or ())
        if events > self.budget.left:
            return None
        self.budget.left -= events
        return found

    @functools.cached_property
    def moments(self) -> dict[SourceEvent, list[Moment]]:
        """Moments of each event, on all paths."""
        found: dict[SourceEvent, list[Moment]] = {}
        for path in self.paths:
            for moment in _moments(path):
                found.setdefault(moment.event, []).append(moment)
        return found

    def visits(self, *kinds: str) -> Iterator[tuple[SourceEvent, list[Moment]]]:
        """Yield each event of these kinds with its moments on all paths, in source order."""
        if not self.has(*kinds):
            return
        asked = [item for item in self.moments.items() if item[0].kind in kinds]
        yield from sorted(asked, key=lambda item: (item[0].line, item[0].node.col_offset))

    def events_of(self, *kinds: str) -> list[SourceEvent]:
        return [event for event in self.events if event.kind in kinds]

    def has(self, *kinds: str) -> bool:
        return not self.kinds.isdisjoint(kinds)

    @functools.cached_property
    def kinds(self) -> set[str]:
        return {event.kind for event in self.events}

    @functools.cached_property
    def autocasts(self) -> list[AutocastContext]:
        """Autocast regions entered in the step that may be enabled, each once."""
        sites = self.trace.statements_in(self.loop)
        found = {autocast.node: autocast for site in sites for autocast in site.context.autocasts}
        return [autocast for autocast in found.values() if autocast.may_be_on]

    @functools.cached_property
    def hidden(self) -> bool:
        """Whether a framework, or a function we cannot follow, may do part of the step."""
        return any(event.kind == EventKind.OPAQUE and ANYTHING in event.keys for event in self.events)

    @functools.cached_property
    def boundary(self) -> BranchGuard | None:
        """Guard that tests for the end of an accumulation window, if steps are taken only there."""
        for event in self.events:
            if event.kind in STEPS:
                for guard in self.own_guards(event):
                    if guard.boundary is not None and guard.holds:
                        return guard
        return None

    def own_guards(self, event: SourceEvent) -> tuple[BranchGuard, ...]:
        """Return the guards of an event that are inside the region."""
        return event.context.guards[self._guards_outside :]

    def inner_loops(self, event: SourceEvent) -> tuple[Loop, ...]:
        """Return the loops around an event that are inside the region."""
        loops = event.context.loops
        return loops[loops.index(self.loop) + 1 :] if self.loop in loops else loops

    @functools.cached_property
    def _guards_outside(self) -> int:
        """Number of leading guards that all events share: those around the loop."""
        if self.loop is None:
            return 0
        shared = self.events[0].context.guards
        for event in self.events:
            pairs = enumerate(zip(shared, event.context.guards, strict=False))
            differ = next((index for index, (mine, other) in pairs if mine != other), len(event.context.guards))
            shared = shared[:differ]
        return len(shared)


def surely_scaled(moments: list[Moment]) -> list[Moment]:
    """Return the moments between a scaled backward and its step; none if something may have unscaled at one of them."""
    scaled = [moment for moment in moments if moment.scaled and not moment.stepped]
    return scaled if all(moment.surely_scaled for moment in scaled) else []


def regions_of(trace: CodeTrace, budget: WorkBudget | None = None) -> list[Region]:
    """Return the training steps of a trace, in order; ``budget`` limits the events on their paths."""
    whole: dict[Loop, bool] = {}
    found: dict[Loop | None, None] = {}
    for event in trace.events():
        if event.kind in STEPS or event.kind in BACKWARDS or event.kind == EventKind.UPDATE:
            found.setdefault(_home(event, whole))
    return [Region(trace, loop, budget) for loop in found]


def _home(event: SourceEvent, whole: dict[Loop, bool]) -> Loop | None:
    """Return the innermost loop around ``event`` with both a backward and a step; ``whole`` caches which loops have."""
    for loop in reversed(event.context.loops):
        if loop not in whole:
            whole[loop] = _makes_and_applies(list(events_in(loop.block)))
        if whole[loop]:
            return loop
    if event.kind in BACKWARDS and event.context.loops:
        return event.context.loops[-1]  # gradients that are, as far as we see, never applied
    return None


def _makes_and_applies(events: list[SourceEvent]) -> bool:
    kinds = {event.kind for event in events}
    hidden = any(ANYTHING in event.keys for event in events)
    return hidden or bool(kinds & {*BACKWARDS} and kinds & {*STEPS})


def _moments(path: ExecutionPath) -> Iterator[Moment]:
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


def _advance(state: Moment, event: SourceEvent) -> None:
    """Update the state after an event; dictionaries that change are replaced, since moments share them."""
    kind = event.kind
    if kind == EventKind.SCALED_BACKWARD:
        state.scaled = {**state.scaled, event.key or "": event}
        state.stepped, state.updated = {}, {}
    elif kind == EventKind.BACKWARD:
        state.plain = event
        state.stepped, state.updated = {}, {}
    elif kind == EventKind.UNSCALE:
        state.unscaled = {**state.unscaled, (event.key, event.other): event}
    elif kind == EventKind.SCALER_STEP:
        state.stepped = {**state.stepped, event.other: event}
    elif kind == EventKind.OPTIMIZER_STEP:
        state.stepped = {**state.stepped, event.key: event}
    elif kind == EventKind.UPDATE:
        state.scaled = {key: made for key, made in state.scaled.items() if key != (event.key or "")}
        state.unscaled, state.opaque = {}, False
        state.updated = {**state.updated, event.key: event}
    elif kind == EventKind.ZERO_GRAD:
        state.scaled, state.plain = {}, None
    elif kind == EventKind.OPAQUE:
        state.opaque = True
