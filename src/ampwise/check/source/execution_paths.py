"""Execution paths through a block: one for each combination of its ``if``s, or a sample if there are too many."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampwise.check.source.events import Branch, BranchGuard, EventBlock, FollowedCall, Jump, Loop, SourceEvent

MOST_PATHS = 256  # a block with more paths is judged by a sample of them
MOST_COPIED = 100_000  # events that are copied or compared to find all paths
MOST_SAMPLED = 96  # paths of a sample
MOST_COMPARED = 1_000_000  # pairs of decisions that are compared to choose a sample
LITERALS = tuple("'\"0123456789-")  # how they begin
PATIENCE = 8  # paths without a new pair of decisions, before a sample is complete


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
        return [path for path in _Runner(block).run(block, [ExecutionPath()]) if path.ended != "raise"]
    except TooManyPaths:
        return None


def sampled_paths(block: EventBlock) -> list[ExecutionPath]:
    """Return some of the paths through a block: each side of each ``if`` and, if possible, each pair of sides."""
    sampler = _Sampler(block)
    found: dict[tuple[object, ...], ExecutionPath] = {}
    nothing_new = 0
    for _ in range(MOST_SAMPLED):
        path = ExecutionPath()
        sampler.run(block, path)
        if path.ended != "raise":
            found.setdefault((path.ended, *map(id, path.events)), path)
        nothing_new = 0 if sampler.is_new(path) else nothing_new + 1
        if nothing_new == PATIENCE or sampler.compared > MOST_COMPARED:
            break
    return list(found.values())


class _Runner:
    """All paths at once, block by block."""

    def __init__(self, block: EventBlock) -> None:
        self.copied = 0
        self.number: dict[Branch, int] = {}  # in source order
        self.last_asked: dict[str, int] = {}  # the number of the last branch with this condition
        for number, branch in enumerate(_branches(block)):
            self.number[branch] = number
            for guard in (*branch.then_guards, *branch.else_guards):
                self.last_asked[guard.text] = number
        self.reached = 0

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
                ended, going = [], self.merged(ended + going)
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
        for path in paths:
            path.ended = _after(node, path.ended)
        return paths

    def fork(self, branch: Branch, paths: list[ExecutionPath]) -> list[ExecutionPath]:
        self.spend(paths)
        self.reached = self.number[branch]
        result: list[ExecutionPath] = []
        for path in paths:
            for decided, block in _open_sides(branch, path):
                result += self.run(block, [ExecutionPath(list(path.events), {**path.decided, **decided})])
        return result

    def merged(self, paths: list[ExecutionPath]) -> list[ExecutionPath]:
        """Merge paths with the same events that will go on alike into one, with the decisions that all share."""
        unique: dict[tuple[object, ...], ExecutionPath] = {}
        for path in paths:
            again = frozenset([item for item in path.decided.items() if self.last_asked[item[0]] > self.reached])
            mark = (path.ended, again, *map(id, path.events))
            if mark in unique:
                kept = unique[mark]
                kept.decided = {text: held for text, held in kept.decided.items() if path.decided.get(text) == held}
            else:
                unique[mark] = path
        return list(unique.values())


class _Sampler:
    """One path at a time, each as different as possible from those before it."""

    def __init__(self, block: EventBlock) -> None:
        self.compared = 0
        self.taken: collections.Counter[EventBlock] = collections.Counter()  # sides of branches
        self.pairs: set[tuple[tuple[str, bool], tuple[str, bool]]] = set()  # of decisions on one path
        self.inside = {side: list(_sides(side)) for side in _sides(block)}

    def is_new(self, path: ExecutionPath) -> bool:
        """Remember the decisions of a path; whether it has two that no path before it had."""
        before = len(self.pairs)
        self.pairs.update(itertools.combinations(path.decided.items(), 2))
        self.compared += len(path.decided) ** 2
        return len(self.pairs) > before

    def run(self, block: EventBlock, path: ExecutionPath) -> None:
        for node in block.nodes:
            if isinstance(node, SourceEvent):
                path.events.append(node)
            elif isinstance(node, Jump):
                path.ended = node.kind
            elif isinstance(node, Branch):
                sides = list(_open_sides(node, path))
                if sides:
                    decided, side = max(sides, key=lambda one: self.worth(one[0], one[1], path))
                    self.taken[side] += 1
                    path.decided.update(decided)
                    self.run(side, path)
            else:
                self.run(node.block, path)
                path.ended = _after(node, path.ended)
            if path.ended is not None:
                return

    def worth(self, decided: dict[str, bool], side: EventBlock, path: ExecutionPath) -> tuple[int, ...]:
        """Return what to gain by taking a side: sides never taken, new pairs of decisions, the code after it."""
        taken = self.taken[side]
        leads_on = taken < PATIENCE and (not taken or not all(map(self.taken.__contains__, self.inside[side])))
        self.compared += len(path.decided) * len(decided) + len(self.inside[side])
        new = sum([(before, now) not in self.pairs for before in path.decided.items() for now in decided.items()])
        leaves = bool(side.nodes) and isinstance(side.nodes[-1], Jump)
        return leads_on, new, not leaves, -taken


def _open_sides(branch: Branch, path: ExecutionPath) -> Iterator[tuple[dict[str, bool], EventBlock]]:
    """Yield the sides of an ``if`` that agree with the decisions on a path so far, each with what it decides."""
    for guards, block in ((branch.then_guards, branch.then), (branch.else_guards, branch.orelse)):
        decided: dict[str, bool] = {}
        for guard in guards:
            if path.decided.get(guard.text, guard.holds) != guard.holds or _contradicts(guard, path):
                break
            decided[guard.text] = guard.holds
        else:
            yield decided, block


def _contradicts(guard: BranchGuard, path: ExecutionPath) -> bool:
    """Whether a path has already decided that something equals another literal."""
    start = guard.literal_of
    if start is None or not guard.holds:
        return False
    others = [text[len(start) :] for text, holds in path.decided.items() if holds and text.startswith(start)]
    return any(other[:1] in LITERALS and start + other != guard.text for other in others)


def _after(node: Loop | FollowedCall, ended: str | None) -> str | None:
    """Return the jump that goes on after a loop or a call: ``break`` ends the loop only, ``return`` the call."""
    return None if ended in (("continue", "break") if isinstance(node, Loop) else ("return",)) else ended


def _branches(block: EventBlock) -> Iterator[Branch]:
    for node in block.nodes:
        if isinstance(node, Branch):
            yield node
            yield from _branches(node.then)
            yield from _branches(node.orelse)
        elif isinstance(node, Loop | FollowedCall):
            yield from _branches(node.block)


def _sides(block: EventBlock) -> Iterator[EventBlock]:
    for branch in _branches(block):
        yield branch.then
        yield branch.orelse
