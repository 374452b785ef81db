"""The straight lines a run may take through a block: one for each way its ``if``s can go."""

from __future__ import annotations

from ampwise.source.events import Block, Branch, Event, Guard, Jump, Loop, Node

__all__ = ["Path", "paths_through"]

MOST_PATHS = 256  # beyond this the answer is "too many to tell"


class Path:
    """Events in order, and what was decided on the way."""

    __slots__ = ("decided", "ended", "events")

    def __init__(
        self, events: list[Event] | None = None, decided: dict[str, bool] | None = None, ended: str | None = None
    ) -> None:
        self.events = [] if events is None else events
        self.decided = {} if decided is None else decided
        self.ended = ended  # the jump that ended it

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
        return [path for path in _run(block, [Path()]) if path.ended != "raise"]
    except TooManyPaths:
        return None


def _run(block: Block, paths: list[Path]) -> list[Path]:
    for node in block.nodes:
        going = [path for path in paths if path.ended is None]
        if not going:
            break
        paths = [path for path in paths if path.ended is not None] + _follow(node, going)
        if len(paths) > MOST_PATHS:
            paths = _merged(paths)
            if len(paths) > MOST_PATHS:
                raise TooManyPaths
    return paths


def _follow(node: Node, paths: list[Path]) -> list[Path]:
    if isinstance(node, Event):
        for path in paths:
            path.events.append(node)
        return paths
    if isinstance(node, Jump):
        for path in paths:
            path.ended = node.kind
        return paths
    if isinstance(node, Branch):
        return _fork(node, paths)
    ends = ("continue", "break") if isinstance(node, Loop) else ("return",)
    done = _run(node.block, paths)
    for path in done:
        if path.ended in ends:
            path.ended = None
    return done


def _fork(branch: Branch, paths: list[Path]) -> list[Path]:
    result: list[Path] = []
    for path in paths:
        sides = ((branch.then_guards, branch.then), (branch.else_guards, branch.orelse))
        for guards, block in sides:
            if path.allows(guards):
                result += _run(block, [path.under(guards)])
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
