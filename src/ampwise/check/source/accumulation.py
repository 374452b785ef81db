"""Gradient accumulation: windows of micro-batches that share one optimizer step.

Three forms are recognised: a step under ``(i + 1) % n == 0``, a step under a counter that is reset there
(``if seen == n: ...; seen = 0``), and an inner loop of backwards with the step after it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.check.source.events import BranchGuard, Loop, SourceEvent
from ampwise.check.source.execution_paths import ExecutionPath
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.steps import BACKWARDS, STEPS, Region

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from ampwise.check.source.project import SourceFile

__all__ = [
    "AccumulationWindow",
    "accumulation_windows",
    "events_of_each_micro_batch",
    "mentions_accumulation",
    "names_one_optimizer",
]

ACCUMULATES = LazyPattern(r"accum|micro|grad_?acc|virtual_?b", re.IGNORECASE)


class AccumulationWindow:
    """Micro-batches that share one step."""

    def __init__(
        self, region: Region, size: ast.expr | None, loop: Loop | None = None, paths: list[ExecutionPath] | None = None
    ) -> None:
        self.region = region
        self.size = size  # number of micro-batches, if an expression gives it
        self.loop = loop  # the inner loop over them; None: the region's own loop, with a test for the last
        self.paths = [] if paths is None else paths  # paths through a micro-batch that is not the last

    def events_on(self, path: ExecutionPath, *kinds: str) -> list[SourceEvent]:
        """Return the events of these kinds that every micro-batch on a path has."""
        return [event for event in path.events if event.kind in kinds and self._belongs(event)]

    def _belongs(self, event: SourceEvent) -> bool:
        return self.loop is None or self.loop in event.context.loops

    def only_sometimes(self, event: SourceEvent) -> bool:
        """Whether ``event`` has conditions that the backward has not, other than constant flags."""
        return any(not self._is_flag(guard) for guard in self.further_guards(event))

    def further_guards(self, event: SourceEvent) -> list[BranchGuard]:
        """Return the guards of ``event`` that no backward has."""
        return [guard for guard in self.region.own_guards(event) if guard not in self._usual_guards]

    @functools.cached_property
    def _usual_guards(self) -> set[BranchGuard]:
        backwards = (backward for backward in self.region.events if backward.kind in BACKWARDS)
        return {guard for backward in backwards for guard in backward.context.guards}

    def _is_flag(self, guard: BranchGuard) -> bool:
        """Whether a test is the same for every micro-batch: nothing in the loop assigns its names."""
        loop = self.loop or self.region.loop
        if guard.test is None or guard.boundary is not None or loop is None:
            return False
        if any(isinstance(part, ast.Call | ast.BinOp) for part in ast.walk(guard.test)):
            return False
        if mentions_accumulation(guard.test) or (self.size and ast.unparse(self.size) in ast.unparse(guard.test)):
            return False  # `if accumulation == 1:` tests whether there are micro-batches at all
        names = {dotted_text(part) for part in ast.walk(guard.test) if isinstance(part, ast.Name | ast.Attribute)}
        return names.isdisjoint(_assigned_in(loop.node))


def accumulation_windows(region: Region) -> list[AccumulationWindow]:
    """Return the accumulation windows of a training step; none if part of the step is in code we cannot see."""
    if region.hidden or not region.has(*BACKWARDS) or not region.has(*STEPS):
        return []
    return [*_tested(region), *_looped(region)]


def events_of_each_micro_batch(
    code: SourceFile, kind: str, applies: Callable[[SourceEvent, AccumulationWindow], bool]
) -> Iterator[SourceEvent]:
    """Yield the events of a kind that happen on every micro-batch, once, if ``applies`` holds in one of the windows."""
    for region in code.regions:
        found: set[SourceEvent] = set()
        for window in accumulation_windows(region):
            for event in dict.fromkeys(event for path in window.paths for event in window.events_on(path, kind)):
                if event not in found and applies(event, window):
                    found.add(event)
                    yield event


def mentions_accumulation(node: ast.AST | None) -> bool:
    """Whether the source of a node mentions accumulation or micro-batches."""
    return node is not None and bool(ACCUMULATES.search(ast.unparse(node)))


def names_one_optimizer(event: SourceEvent) -> bool:
    """Whether the first argument always names the same optimizer; in ``for opt in optimizers`` it changes."""
    node = event.node.args[0] if isinstance(event.node, ast.Call) and event.node.args else None
    while isinstance(node, ast.Attribute):
        node = node.value
    if not isinstance(node, ast.Name):
        return False
    for function in event.frame.function.chain():
        if function.holds(node.id):
            bindings = function.bindings.get(node.id, [])
            return len(bindings) <= 1 and not any(isinstance(b.node, ast.For | ast.AsyncFor) for b in bindings)
    return True


# -- a step under a test ----------------------------------------------------------------------------------


def _tested(region: Region) -> Iterator[AccumulationWindow]:
    seen: set[str] = set()
    for event in region.events:
        if event.kind not in STEPS:
            continue
        guards = region.own_guards(event)
        for index, guard in enumerate(guards):
            size = _size(guard, region)
            if guard.text in seen or size is None or _is_one(size, event):
                continue
            seen.add(guard.text)
            paths = [path for path in region.paths if _between_steps(path, guard, guards[:index])]
            if paths:
                yield AccumulationWindow(region, size, paths=paths)


def _between_steps(path: ExecutionPath, last: BranchGuard, around: tuple[BranchGuard, ...]) -> bool:
    """Whether a path through a micro-batch computes gradients without a step."""
    if path.decided.get(last.text) is last.holds or path.ended in ("break", "return"):
        return False
    if any(path.decided.get(guard.text) is not guard.holds for guard in around):
        return False  # another mode, which may not accumulate
    kinds = {event.kind for event in path.events}
    return bool(kinds & {*BACKWARDS}) and not kinds & {*STEPS}


def _size(guard: BranchGuard, region: Region) -> ast.expr | None:
    if guard.boundary is not None:
        return _modulus(guard.test) if guard.holds else None
    if isinstance(guard.test, ast.Compare) and len(guard.test.ops) == 1:
        return _counted(guard.test, region)
    return None


def _modulus(test: ast.expr | None) -> ast.expr | None:
    for part in ast.walk(test) if test is not None else ():
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            return part.right
    return None


def _counted(test: ast.Compare, region: Region) -> ast.expr | None:
    """Return n of ``seen >= n`` or ``seen + 1 == n``, if ``seen`` is incremented by one and reset to zero."""
    counter, size = test.left, test.comparators[0]
    if not isinstance(test.ops[0], ast.Eq | ast.GtE) or region.loop is None:
        return None
    if isinstance(counter, ast.BinOp) and isinstance(counter.op, ast.Add) and _is_literal(counter.right, 1):
        counter = counter.left
    name = dotted_text(counter)
    if name is None or (isinstance(size, ast.Constant) and size.value is None):
        return None
    return size if name in _counters(region.loop.node) else None


@functools.lru_cache(maxsize=16)
def _counters(loop: ast.AST) -> set[str | None]:
    """Return the names that a loop increments by one and resets to zero."""
    counted: set[str | None] = set()
    reset: set[str | None] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_literal(node.value, 1):
            counted.add(dotted_text(node.target))
        elif isinstance(node, ast.Assign) and _is_literal(node.value, 0):
            reset.update(dotted_text(target) for target in node.targets)
    return counted & reset


# -- a loop of backwards, and the step after it -----------------------------------------------------------


def _looped(region: Region) -> Iterator[AccumulationWindow]:
    loops = {loop: None for event in region.events if event.kind in BACKWARDS for loop in region.inner_loops(event)}
    stepping = {loop for event in region.events if event.kind in STEPS for loop in event.context.loops}
    for loop in loops:
        if loop in stepping or not _iterates_micro_batches(loop):
            continue
        size = _range_of(loop.node)
        paths = [path for path in region.paths if any(loop in event.context.loops for event in path.events)]
        if paths and not (size and _is_literal(size, 1)):
            yield AccumulationWindow(region, size, loop, paths)


def _iterates_micro_batches(loop: Loop) -> bool:
    if not isinstance(loop.node, ast.For | ast.AsyncFor):
        return False
    return mentions_accumulation(loop.node.target) or mentions_accumulation(loop.node.iter)


def _range_of(node: ast.For | ast.AsyncFor | ast.While) -> ast.expr | None:
    """Return n of ``for _ in range(n)``."""
    if isinstance(node, ast.While) or not isinstance(node.iter, ast.Call):
        return None
    call = node.iter
    return call.args[0] if dotted_text(call.func) == "range" and len(call.args) == 1 else None


@functools.lru_cache(maxsize=16)
def _assigned_in(node: ast.AST) -> set[str | None]:
    found: set[str | None] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
            found.add(dotted_text(part))
    return found - {None}


def _is_one(size: ast.expr, event: SourceEvent) -> bool:
    values = event.frame.values(size)
    return bool(values) and all(value.node is not None and _is_literal(value.node, 1) for value in values)


def _is_literal(node: ast.expr, number: int) -> bool:
    return isinstance(node, ast.Constant) and node.value == number and not isinstance(node.value, bool)
