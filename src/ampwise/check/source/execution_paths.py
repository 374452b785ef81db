"""Execution paths through a block: one for each combination of its ``if``s."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from ampwise.check.source.events import Branch, BranchGuard, EventBlock, Jump, Loop, Node, SourceEvent

__all__ = ["MOST_PATHS", "ExecutionPath", "paths_through"]

MOST_PATHS = 256  # a block with more paths is not analysed
MOST_COPIED = 1_000_000  # events that are copied or compared: a second of work


class ExecutionPath:
    """Events of one execution path in order, and the conditions that were decided on the way."""

    __slots__ = ("_positions", "decided", "ended", "events")

    def __init__(
        self, events: list[SourceEvent] | None = None, decided: dict[str, bool] | None = None, ended: str | None = None
    ) -> None:
        self.events = [] if events is None else events
        self.decided = {} if decided is None else decided
        self.ended = ended  # the jump that ended it
        self._positions: dict[tuple[str, ...], list[int]] = {}  # of events by kinds, computed on demand

    def after(self, index: int, kinds: tuple[str, ...]) -> Iterator[SourceEvent]:
        """Yield the events of these kinds after a position, in order."""
        positions = self._of(kinds)
        for number in range(bisect.bisect_right(positions, index), len(positions)):
            yield self.events[positions[number]]

    def before(self, index: int, kinds: tuple[str, ...]) -> Iterator[SourceEvent]:
        """Yield the events of these kinds before a position, the latest first."""
        positions = self._of(kinds)
        for number in range(bisect.bisect_left(positions, index) - 1, -1, -1):
            yield self.events[positions[number]]

    def _of(self, kinds: tuple[str, ...]) -> list[int]:
        if kinds not in self._positions:
            self._positions[kinds] = [index for index, event in enumerate(self.events) if event.kind in kinds]
        return self._positions[kinds]

    def allows(self, guards: tuple[BranchGuard, ...]) -> bool:
        return all(self.decided.get(guard.text, guard.holds) == guard.holds for guard in guards)

    def under(self, guards: tuple[BranchGuard, ...]) -> ExecutionPath:
        return ExecutionPath(list(self.events), self.decided | {guard.text: guard.holds for guard in guards})


class TooManyPaths(Exception):
    """A block has more execution paths than the limit."""


def paths_through(block: EventBlock) -> list[ExecutionPath] | None:
    """Return all paths through a block; None if there are too many.

    Two ``if``s with the same condition take the same side. Paths that raise are left out, since they do not train.
    """
    try:
        return [path for path in _Runner().run(block, [ExecutionPath()]) if path.ended != "raise"]
    except TooManyPaths:
        return None


class _Runner:
    def __init__(self) -> None:
        self.copied = 0

    def spend(self, paths: list[ExecutionPath]) -> None:
        """Count events that are copied or compared, and stop at the limit."""
        self.copied += sum(len(path.events) + len(path.decided) for path in paths)
        if self.copied > MOST_COPIED:
            raise TooManyPaths

    def run(self, block: EventBlock, paths: list[ExecutionPath]) -> list[ExecutionPath]:
        for node in block.nodes:
            going = [path for path in paths if path.ended is None]
            if not going:
                break
            paths = [path for path in paths if path.ended is not None] + self.follow(node, going)
            if len(paths) > MOST_PATHS:
                self.spend(paths)
                paths = _merged(paths)
                if len(paths) > MOST_PATHS:
                    raise TooManyPaths
        return paths

    def follow(self, node: Node, paths: list[ExecutionPath]) -> list[ExecutionPath]:
        if isinstance(node, SourceEvent):
            for path in paths:
                path.events.append(node)
            return paths
        if isinstance(node, Jump):
            for path in paths:
                path.ended = node.kind
            return paths
        if isinstance(node, Branch):
            return self.fork(node, paths)
        ends = ("continue", "break") if isinstance(node, Loop) else ("return",)
        done = self.run(node.block, paths)
        for path in done:
            if path.ended in ends:
                path.ended = None
        return done

    def fork(self, branch: Branch, paths: list[ExecutionPath]) -> list[ExecutionPath]:
        self.spend(paths)
        result: list[ExecutionPath] = []
        for path in paths:
            sides = ((branch.then_guards, branch.then), (branch.else_guards, branch.orelse))
            for guards, block in sides:
                if path.allows(guards):
                    result += self.run(block, [path.under(guards)])
        return result


def _merged(paths: list[ExecutionPath]) -> list[ExecutionPath]:
    """Merge paths with the same events into one, with the decisions that all of them share."""
    unique: dict[tuple[object, ...], ExecutionPath] = {}
    for path in paths:
        mark = (path.ended, *map(id, path.events))
        if mark in unique:
            kept = unique[mark]
            kept.decided = {text: held for text, held in kept.decided.items() if path.decided.get(text) == held}
        else:
            unique[mark] = path
    return list(unique.values())
