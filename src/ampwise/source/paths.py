"""The straight lines a run may take through a block: one for each way its ``if``s can go."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from ampwise.source.events import Block, Branch, Event, Guard, Jump, Loop, Node

__all__ = ["MOST_PATHS", "Path", "paths_through"]

MOST_PATHS = 256  # beyond this the answer is "too many to tell"
MOST_COPIED = 1_000_000  # events copied from path to path, or compared: a second of work


class Path:
    """Events in order, and what was decided on the way."""

    __slots__ = ("_positions", "decided", "ended", "events")

    def __init__(
        self, events: list[Event] | None = None, decided: dict[str, bool] | None = None, ended: str | None = None
    ) -> None:
        self.events = [] if events is None else events
        self.decided = {} if decided is None else decided
        self.ended = ended  # the jump that ended it
        self._positions: dict[tuple[str, ...], list[int]] = {}  # of events by kinds, once asked

    def after(self, index: int, kinds: tuple[str, ...]) -> Iterator[Event]:
        """The events of these kinds behind a position, in order."""
        positions = self._of(kinds)
        for number in range(bisect.bisect_right(positions, index), len(positions)):
            yield self.events[positions[number]]

    def before(self, index: int, kinds: tuple[str, ...]) -> Iterator[Event]:
        """The events of these kinds in front of a position, the latest first."""
        positions = self._of(kinds)
        for number in range(bisect.bisect_left(positions, index) - 1, -1, -1):
            yield self.events[positions[number]]

    def _of(self, kinds: tuple[str, ...]) -> list[int]:
        if kinds not in self._positions:
            self._positions[kinds] = [index for index, event in enumerate(self.events) if event.kind in kinds]
        return self._positions[kinds]

    def allows(self, guards: tuple[Guard, ...]) -> bool:
        return all(self.decided.get(guard.text, guard.holds) == guard.holds for guard in guards)

    def under(self, guards: tuple[Guard, ...]) -> Path:
        return Path(list(self.events), self.decided | {guard.text: guard.holds for guard in guards})


class TooManyPaths(Exception):
    """A block with more ways through it than we care to follow."""


def paths_through(block: Block) -> list[Path] | None:
    """All paths through a block, two ``if``s on the same question answered alike; None when there are too many.

    A path that raises is left out: nothing of it is trained on.
    """
    try:
        return [path for path in _Runner().run(block, [Path()]) if path.ended != "raise"]
    except TooManyPaths:
        return None


class _Runner:
    def __init__(self) -> None:
        self.copied = 0

    def spend(self, paths: list[Path]) -> None:
        """Account for events that are copied or compared."""
        self.copied += sum(len(path.events) + len(path.decided) for path in paths)
        if self.copied > MOST_COPIED:
            raise TooManyPaths

    def run(self, block: Block, paths: list[Path]) -> list[Path]:
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

    def follow(self, node: Node, paths: list[Path]) -> list[Path]:
        if isinstance(node, Event):
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

    def fork(self, branch: Branch, paths: list[Path]) -> list[Path]:
        self.spend(paths)
        result: list[Path] = []
        for path in paths:
            sides = ((branch.then_guards, branch.then), (branch.else_guards, branch.orelse))
            for guards, block in sides:
                if path.allows(guards):
                    result += self.run(block, [path.under(guards)])
        return result


def _merged(paths: list[Path]) -> list[Path]:
    """Paths with the same events are one, knowing what all of them know."""
    unique: dict[tuple[object, ...], Path] = {}
    for path in paths:
        mark = (path.ended, *map(id, path.events))
        if mark in unique:
            kept = unique[mark]
            kept.decided = {text: held for text, held in kept.decided.items() if path.decided.get(text) == held}
        else:
            unique[mark] = path
    return list(unique.values())
