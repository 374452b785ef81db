"""Training steps: the loops in which gradients are computed and applied, and the state of the gradients on each path.

A ``Region`` is the body of the innermost loop that contains both a backward and the step that follows it (or a
whole function, if there is no loop). A small state machine follows its paths; a ``Moment`` is one event on one
path with the state just before it. Rules check what holds at all moments of an event, or at some of them: they
compare paths, not line numbers.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.check.source.call_events import ANYTHING
from ampwise.check.source.events import BranchGuard, EventBlock, EventKind, Loop, SourceEvent
from ampwise.check.source.execution_paths import ExecutionPath, paths_through, sampled_paths
from ampwise.check.source.precision import AutocastContext
from ampwise.check.source.walk import CodeSite, CodeTrace, WorkBudget, events_in
from ampwise.finding import Place

BACKWARDS = (EventKind.BACKWARD, EventKind.SCALED_BACKWARD)
STEPS = (EventKind.SCALER_STEP, EventKind.OPTIMIZER_STEP)
MOST_ON_PATHS = 50_000  # events on the paths of one file, each counted on every path


@dataclass(slots=True, eq=False)
class Moment:
    """Event on a path, with the state just before it."""

    event: SourceEvent
    path: ExecutionPath
    index: int
    scaled: dict[str, SourceEvent]  # scalers with scaled gradients
    plain: SourceEvent | None  # a backward without a scaler, not yet applied
    unscaled: dict[tuple[str | None, str | None], SourceEvent]  # since the last update
    stepped: dict[str | None, SourceEvent]  # optimizers applied since the last backward
    updated: dict[str | None, SourceEvent]  # scalers updated since the last backward
    opaque: bool  # a function we cannot follow got a scaler or an optimizer, and may have changed these gradients

    def later(self, *kinds: str) -> Iterator[SourceEvent]:
        """Yield the later events of these kinds on this path."""
        positions = self.path.positions(kinds)
        for number in range(bisect.bisect_right(positions, self.index), len(positions)):
            yield self.path.events[positions[number]]

    def earlier(self, *kinds: str) -> Iterator[SourceEvent]:
        """Yield the earlier events of these kinds on this path, the latest first."""
        positions = self.path.positions(kinds)
        for number in range(bisect.bisect_left(positions, self.index) - 1, -1, -1):
            yield self.path.events[positions[number]]

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

    def __init__(self, trace: CodeTrace, loop: Loop | None, budget: WorkBudget) -> None:
        self.trace, self.loop, self.budget = trace, loop, budget
        self.block: EventBlock = loop.block if loop else trace.block
        self.events = events_in(self.block)
        self.kinds = {event.kind for event in self.events}
        self.is_sampled = False  # whether the paths are only a sample

    @property
    def place(self) -> Place:
        """Place where the loop begins or, without a loop, the function."""
        function = self.trace.frame.function
        return self.loop.frame.outline.script.place(self.loop.node) if self.loop else function.place

    @functools.cached_property
    def paths(self) -> list[ExecutionPath]:
        """Paths through the step; if there are too many, a sample that takes each side of each ``if``."""
        found = paths_through(self.block)
        if found is not None:
            self.budget.left -= sum([len(path.events) for path in found])
        if found is None or self.budget.left < 0:
            self.is_sampled = True
            found = sampled_paths(self.block)
        return [path for path in found if not _has_used_what_is_missing(path)] or found

    @functools.cached_property
    def moments(self) -> dict[SourceEvent, list[Moment]]:
        """Moments of each event, on all paths."""
        found: dict[SourceEvent, list[Moment]] = {}
        for path in self.paths:
            _add_moments(path, found)
        return found

    def visits(self, *kinds: str) -> list[tuple[SourceEvent, list[Moment]]]:
        """Return each event of these kinds with its moments on all paths, in source order."""
        if self.kinds.isdisjoint(kinds):
            return []
        asked = [item for item in self.moments.items() if item[0].kind in kinds]
        return sorted(asked, key=lambda item: (item[0].node.lineno, item[0].node.col_offset))

    def events_of(self, *kinds: str) -> list[SourceEvent]:
        return [event for event in self.events if event.kind in kinds]

    def has(self, *kinds: str) -> bool:
        return not self.kinds.isdisjoint(kinds)

    @functools.cached_property
    def autocasts(self) -> list[AutocastContext]:
        """Autocast regions entered in the step that may be enabled, each once."""
        return self._entered(self.trace.statements_in(self.loop))

    @functools.cached_property
    def autocasts_with_gradients(self) -> list[AutocastContext]:
        """Those of the training, without those of an evaluation or of a teacher."""
        return self._entered([site for site in self.trace.statements_in(self.loop) if not site.context.no_grad])

    def _entered(self, sites: list[CodeSite]) -> list[AutocastContext]:
        found = {autocast.node: autocast for site in sites for autocast in site.context.autocasts}
        return [autocast for autocast in found.values() if autocast.may_be_on]

    @functools.cached_property
    def hidden(self) -> bool:
        """Whether a framework, or a function we cannot follow, may do part of the step."""
        return any(ANYTHING in event.keys for event in self.events_of(EventKind.OPAQUE))

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


def _has_used_what_is_missing(path: ExecutionPath) -> bool:
    """Whether a path scales by a scaler and then takes the side of an ``if scaler:`` where there is none."""
    return any(
        path.decided.get(f"some({path.events[index].key})") is False
        for index in path.positions((EventKind.SCALED_BACKWARD,))
    )


def surely_scaled(moments: list[Moment]) -> list[Moment]:
    """Return the moments between a scaled backward and its step; none if something may have unscaled at one of them."""
    scaled = [moment for moment in moments if moment.scaled and not moment.stepped]
    return scaled if all(moment.surely_scaled for moment in scaled) else []


class VisibleRegion(Region):
    """The paths of a training step in which no framework, and no function we cannot follow, has a part."""

    def __init__(self, whole: Region) -> None:
        super().__init__(whole.trace, whole.loop, whole.budget)
        hidden = {event for event in whole.events if ANYTHING in event.keys}
        self.paths = [path for path in whole.paths if hidden.isdisjoint(path.events)]
        on_paths = {event for path in self.paths for event in path.events}
        self.events = [event for event in whole.events if event in on_paths]
        self.kinds = {event.kind for event in self.events}


def regions_of(trace: CodeTrace, budget: WorkBudget) -> list[Region]:
    """Return the training steps of a trace, in order; ``budget`` limits the events on their paths."""
    whole: dict[Loop, bool] = {}  # loops with both a backward and a step
    found: dict[Loop | None, None] = {}
    for event in trace.events():
        if event.kind not in STEPS and event.kind not in BACKWARDS and event.kind != EventKind.UPDATE:
            continue
        home = None
        for loop in reversed(event.context.loops):
            if loop not in whole:
                events = events_in(loop.block)
                kinds = {inner.kind for inner in events}
                is_whole = not kinds.isdisjoint(BACKWARDS) and not kinds.isdisjoint(STEPS)
                whole[loop] = is_whole or any(ANYTHING in inner.keys for inner in events if inner.keys)
            if whole[loop]:
                home = loop
                break
        else:
            if event.kind in BACKWARDS and event.context.loops:
                home = event.context.loops[-1]  # gradients that are, as far as we see, never applied
        found[home] = None
    return [Region(trace, loop, budget) for loop in found]


def _add_moments(path: ExecutionPath, found: dict[SourceEvent, list[Moment]]) -> None:
    """Add the moments of a path; dictionaries that change are replaced, since moments share them."""
    scaled: dict[str, SourceEvent] = {}
    unscaled: dict[tuple[str | None, str | None], SourceEvent] = {}
    stepped: dict[str | None, SourceEvent] = {}
    updated: dict[str | None, SourceEvent] = {}
    plain: SourceEvent | None = None
    opaque = False
    for index, event in enumerate(path.events):
        moment = Moment(event, path, index, scaled, plain, unscaled, stepped, updated, opaque)
        found.setdefault(event, []).append(moment)
        match event.kind:
            case EventKind.SCALED_BACKWARD | EventKind.BACKWARD:
                if event.kind == EventKind.SCALED_BACKWARD:
                    scaled = {**scaled, event.key or "": event}
                else:
                    plain = event
                # What a function did before it cannot concern these gradients; it may have updated after an unscale.
                stepped, updated, opaque = {}, {}, opaque and bool(unscaled)
            case EventKind.UNSCALE:
                unscaled = {**unscaled, (event.key, event.other): event}
            case EventKind.SCALER_STEP:
                stepped = {**stepped, event.other: event}
            case EventKind.OPTIMIZER_STEP:
                stepped = {**stepped, event.key: event}
            case EventKind.UPDATE:
                scaled = {key: made for key, made in scaled.items() if key != (event.key or "")}
                unscaled, opaque = {}, False
                updated = {**updated, event.key: event}
            case EventKind.ZERO_GRAD:
                scaled, plain, opaque = {}, None, opaque and bool(unscaled)
            case EventKind.OPAQUE:
                opaque = True
