"""Gradient accumulation: windows of micro-batches that share one optimizer step.

Three forms are recognised: a step under ``(i + 1) % n == 0``, a step under a counter that is reset there
(``if seen == n: ...; seen = 0``), and an inner loop of backwards with the step after it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.events import BranchGuard, Loop, SourceEvent
from ampwise.check.source.execution_paths import ExecutionPath
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.steps import BACKWARDS, STEPS, Region

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile

ACCUMULATES = LazyPattern(r"accum|micro|grad_?acc|virtual_?b", re.IGNORECASE)


class AccumulationWindow:
    """Micro-batches that share one step."""

    def __init__(self, region: Region, size: ast.expr | None, loop: Loop | None, paths: list[ExecutionPath]) -> None:
        self.region = region
        self.size = size  # number of micro-batches, if an expression gives it
        self.loop = loop  # the inner loop over them; None: the region's own loop, with a test for the last
        self.paths = paths  # paths through a micro-batch that is not the last
        backwards = region.events_of(*BACKWARDS)
        self._usual_guards = {guard for backward in backwards for guard in backward.context.guards}

    def events_on(self, path: ExecutionPath, *kinds: str) -> list[SourceEvent]:
        """Return the events of these kinds that every micro-batch on a path has."""
        events = [event for event in path.events if event.kind in kinds]
        return events if self.loop is None else [event for event in events if self.loop in event.context.loops]

    def only_sometimes(self, event: SourceEvent) -> bool:
        """Whether ``event`` has conditions that the backward has not, other than constant flags."""
        return any(not self._is_flag(guard) for guard in self.further_guards(event))

    def further_guards(self, event: SourceEvent) -> list[BranchGuard]:
        """Return the guards of ``event`` that no backward has."""
        return [guard for guard in self.region.own_guards(event) if guard not in self._usual_guards]

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
    home = event.frame.function.home_of(node.id)
    bindings = home.bindings.get(node.id, []) if home is not None else []
    return len(bindings) <= 1 and not any(isinstance(binding.node, ast.For | ast.AsyncFor) for binding in bindings)


def _tested(region: Region) -> Iterator[AccumulationWindow]:
    """Yield the windows that end with a step under a test."""
    seen: set[str] = set()
    for event in region.events_of(*STEPS):
        guards = region.own_guards(event)
        for index, guard in enumerate(guards):
            size = _size(guard, region)
            if guard.text in seen or size is None:
                continue
            values = event.frame.values(size)
            if values and all(value.node is not None and _is_literal(value.node, 1) for value in values):
                continue
            seen.add(guard.text)
            paths = [path for path in region.paths if _is_between_steps(path, guard, guards[:index])]
            if paths:
                yield AccumulationWindow(region, size, None, paths)


def _is_between_steps(path: ExecutionPath, last: BranchGuard, around: tuple[BranchGuard, ...]) -> bool:
    """Whether a path through a micro-batch computes gradients without a step."""
    if path.decided.get(last.text) is last.holds or path.ended in ("break", "return"):
        return False
    if any(path.decided.get(guard.text) is not guard.holds for guard in around):
        return False  # another mode, which may not accumulate
    kinds = {event.kind for event in path.events}
    return not kinds.isdisjoint(BACKWARDS) and kinds.isdisjoint(STEPS)


def _size(guard: BranchGuard, region: Region) -> ast.expr | None:
    """Return n of ``i % n == 0``, or of ``seen >= n`` or ``seen + 1 == n`` if the loop counts and resets ``seen``."""
    test = guard.test
    if guard.boundary is not None:
        parts = [part for part in ast.walk(test) if isinstance(part, ast.BinOp)] if test and guard.holds else []
        return next((part.right for part in parts if isinstance(part.op, ast.Mod)), None)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or region.loop is None:
        return None
    counter, size = test.left, test.comparators[0]
    if not isinstance(test.ops[0], ast.Eq | ast.GtE) or (isinstance(size, ast.Constant) and size.value is None):
        return None
    if isinstance(counter, ast.BinOp) and isinstance(counter.op, ast.Add) and _is_literal(counter.right, 1):
        counter = counter.left
    name = dotted_text(counter)
    return size if name is not None and name in _counters(region.loop.node) else None


@functools.lru_cache(maxsize=16)
def _counters(loop: ast.AST) -> set[str | None]:
    """Return the names that a loop increments by one and resets to zero."""
    counted: set[str | None] = set()
    reset: set[str | None] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_literal(node.value, 1):
            counted.add(dotted_text(node.target))
        elif isinstance(node, ast.Assign) and _is_literal(node.value, 0):
            reset.update([dotted_text(target) for target in node.targets])
    return counted & reset


def _looped(region: Region) -> Iterator[AccumulationWindow]:
    """Yield the windows that are a loop of backwards, with the step after it."""
    loops = dict.fromkeys([loop for event in region.events_of(*BACKWARDS) for loop in region.inner_loops(event)])
    stepping = {loop for event in region.events_of(*STEPS) for loop in event.context.loops}
    for loop in loops:
        node = loop.node
        if loop in stepping or isinstance(node, ast.While):
            continue
        if not mentions_accumulation(node.target) and not mentions_accumulation(node.iter):
            continue
        size = None
        if isinstance(node.iter, ast.Call) and dotted_text(node.iter.func) == "range" and len(node.iter.args) == 1:
            size = node.iter.args[0]  # n of `for _ in range(n)`
        paths = [path for path in region.paths if any(loop in event.context.loops for event in path.events)]
        if paths and not (size and _is_literal(size, 1)):
            yield AccumulationWindow(region, size, loop, paths)


@functools.lru_cache(maxsize=16)
def _assigned_in(node: ast.AST) -> set[str | None]:
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    return {dotted_text(part) for part in parts if isinstance(part.ctx, ast.Store)} - {None}


def _is_literal(node: ast.expr, number: int) -> bool:
    return isinstance(node, ast.Constant) and node.value == number and not isinstance(node.value, bool)
