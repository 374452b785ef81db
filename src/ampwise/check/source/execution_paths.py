"""Execution paths through a block: one for each combination of its ``if``s."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampwise.check.source.events import Branch, EventBlock, FollowedCall, Jump, Loop, SourceEvent

MOST_PATHS = 256  # a block with more paths is not analysed
MOST_COPIED = 1_000_000  # events that are copied or compared: a second of work


@dataclass(slots=True, eq=False)
class ExecutionPath:
    """Events of one execution path in order, and the conditions that were decided on the way."""

    events: list[SourceEvent] = field(default_factory=list)
    decided: dict[str, bool] = field(default_factory=dict)
    ended: str | None = None  # the jump that ended it
    _positions: dict[tuple[str, ...], list[int]] = field(default_factory=dict)  # of events by kinds

    def positions(self, kinds: tuple[str, ...]) -> list[int]:
        """Return the positions of the events of these kinds."""
        if kinds not in self._positions:
            self._positions[kinds] = [index for index, event in enumerate(self.events) if event.kind in kinds]
        return self._positions[kinds]


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
        self.copied += sum([len(path.events) + len(path.decided) for path in paths])
        if self.copied > MOST_COPIED:
            raise TooManyPaths

    def run(self, block: EventBlock, going: list[ExecutionPath]) -> list[ExecutionPath]:
        """Follow paths through a block; those that a jump ended come first, as far as others went on after it."""
        ended: list[ExecutionPath] = []
        may_have_ended = False
        for node in block.nodes:
            if may_have_ended:
                ended += [path for path in going if path.ended is not None]
                going = [path for path in going if path.ended is None]
                may_have_ended = False
            if not going:
                break
            if isinstance(node, SourceEvent):
                for path in going:
                    path.events.append(node)
                continue
            may_have_ended = True
            going = self.follow(node, going)
            if len(ended) + len(going) > MOST_PATHS:
                self.spend(ended + going)
                ended, going = [], _merged(ended + going)
                if len(going) > MOST_PATHS:
                    raise TooManyPaths
        return ended + going

    def follow(self, node: Branch | Loop | FollowedCall | Jump, paths: list[ExecutionPath]) -> list[ExecutionPath]:
        if isinstance(node, Branch):
            return self.fork(node, paths)
        if isinstance(node, Jump):
            for path in paths:
                path.ended = node.kind
            return paths
        paths = self.run(node.block, paths)
        ends = ("continue", "break") if isinstance(node, Loop) else ("return",)
        for path in paths:
            if path.ended in ends:
                path.ended = None
        return paths

    def fork(self, branch: Branch, paths: list[ExecutionPath]) -> list[ExecutionPath]:
        self.spend(paths)
        result: list[ExecutionPath] = []
        for path in paths:
            for guards, block in ((branch.then_guards, branch.then), (branch.else_guards, branch.orelse)):
                decided = dict(path.decided)
                for guard in guards:
                    if path.decided.get(guard.text, guard.holds) != guard.holds:
                        break
                    decided[guard.text] = guard.holds
                else:
                    result += self.run(block, [ExecutionPath(list(path.events), decided)])
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
