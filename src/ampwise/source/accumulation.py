"""Gradient accumulation: the windows of micro-batches after which a step is taken, and what each of them does.

Three spellings are known: a step under ``(i + 1) % n == 0``, a step under a counter that is set back there
(``if seen == n: ...; seen = 0``), and an inner loop of backwards with the step after it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.source.events import Event, Guard, Loop
from ampwise.source.names import dotted_text
from ampwise.source.paths import Path
from ampwise.source.pattern import Pattern
from ampwise.source.steps import BACKWARDS, STEPS, Region

__all__ = ["Window", "accumulation_name", "fixed_name", "windows_of"]

ACCUMULATES = Pattern(r"accum|micro|grad_?acc|virtual_?b", re.IGNORECASE)


class Window:
    """Micro-batches that share one step."""

    def __init__(
        self, region: Region, size: ast.expr | None, loop: Loop | None = None, paths: list[Path] | None = None
    ) -> None:
        self.region = region
        self.size = size  # how many they are, where an expression says so
        self.loop = loop  # the inner loop over them; None: the region's own loop, with a test for the last
        self.paths = [] if paths is None else paths  # through a micro-batch that is not the last

    def visits(self, *kinds: str) -> Iterator[tuple[Event, Path]]:
        """Each event of these kinds that comes with every micro-batch, once, with a path it is on."""
        seen: set[Event] = set()
        for path in self.paths:
            for event in path.events:
                if event.kind in kinds and event not in seen and self._belongs(event):
                    seen.add(event)
                    yield event, path

    def backwards(self, path: Path) -> list[Event]:
        return [event for event in path.events if event.kind in BACKWARDS and self._belongs(event)]

    def _belongs(self, event: Event) -> bool:
        return self.loop is None or self.loop in event.context.loops

    def only_sometimes(self, event: Event) -> bool:
        """Whether ``event`` may wait for its turn: it is asked for more than the backward is, and not by a flag."""
        return any(not self._is_flag(guard) for guard in self.further_guards(event))

    def further_guards(self, event: Event) -> list[Guard]:
        """What must hold for ``event`` beyond what holds for a backward."""
        return [guard for guard in self.region.own_guards(event) if guard not in self._usual_guards]

    @functools.cached_property
    def _usual_guards(self) -> set[Guard]:
        backwards = (backward for backward in self.region.events if backward.kind in BACKWARDS)
        return {guard for backward in backwards for guard in backward.context.guards}

    def _is_flag(self, guard: Guard) -> bool:
        """A question that every micro-batch answers alike: of names that nothing in the loop assigns."""
        loop = self.loop or self.region.loop
        if guard.test is None or guard.boundary is not None or loop is None:
            return False
        if any(isinstance(part, ast.Call | ast.BinOp) for part in ast.walk(guard.test)):
            return False
        if accumulation_name(guard.test) or (self.size and ast.unparse(self.size) in ast.unparse(guard.test)):
            return False  # `if accumulation == 1:` asks whether there are micro-batches at all
        names = {dotted_text(part) for part in ast.walk(guard.test) if isinstance(part, ast.Name | ast.Attribute)}
        return names.isdisjoint(_assigned_in(loop.node))


def windows_of(region: Region) -> list[Window]:
    """The accumulation windows of a training step; none where part of the step is out of sight."""
    if region.hidden or not region.has(*BACKWARDS) or not region.has(*STEPS):
        return []
    return [*_tested(region), *_looped(region)]


def accumulation_name(node: ast.AST | None) -> bool:
    """Whether what is written there is called after accumulation or micro-batches."""
    return node is not None and bool(ACCUMULATES.search(ast.unparse(node)))


def fixed_name(node: ast.expr, event: Event) -> bool:
    """Whether a name stands for one object throughout: no loop variable, not assigned twice, no subscript."""
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    if isinstance(node, ast.Attribute):
        return fixed_name(node.value, event) if isinstance(node.value, ast.Name | ast.Attribute) else False
    for function in event.frame.function.chain():
        if function.holds(node.id):
            bindings = function.bindings.get(node.id, [])
            return len(bindings) <= 1 and not any(isinstance(b.node, ast.For | ast.AsyncFor) for b in bindings)
    return True


# -- a step under a test ----------------------------------------------------------------------------------


def _tested(region: Region) -> Iterator[Window]:
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
                yield Window(region, size, paths=paths)


def _between_steps(path: Path, last: Guard, around: tuple[Guard, ...]) -> bool:
    """A way through a micro-batch that makes gradients and leaves them for later."""
    if path.decided.get(last.text) is last.holds or path.ended in ("break", "return"):
        return False
    if any(path.decided.get(guard.text) is not guard.holds for guard in around):
        return False  # another mode, which may not accumulate
    kinds = {event.kind for event in path.events}
    return bool(kinds & {*BACKWARDS}) and not kinds & {*STEPS}


def _size(guard: Guard, region: Region) -> ast.expr | None:
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
    """The n of ``seen >= n``, ``seen + 1 == n``, where seen goes up by one and back to nothing."""
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
    """The names that go up by one in a loop, and back to nothing."""
    counted: set[str | None] = set()
    reset: set[str | None] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_literal(node.value, 1):
            counted.add(dotted_text(node.target))
        elif isinstance(node, ast.Assign) and _is_literal(node.value, 0):
            reset.update(dotted_text(target) for target in node.targets)
    return counted & reset


# -- a loop of backwards, and the step after it -----------------------------------------------------------


def _looped(region: Region) -> Iterator[Window]:
    loops = {loop: None for event in region.events if event.kind in BACKWARDS for loop in _inner_loops(event, region)}
    stepping = {loop for event in region.events if event.kind in STEPS for loop in event.context.loops}
    for loop in loops:
        if loop in stepping or not _iterates_micro_batches(loop):
            continue
        size = _range_of(loop.node)
        paths = [path for path in region.paths if any(loop in event.context.loops for event in path.events)]
        if paths and not (size and _is_literal(size, 1)):
            yield Window(region, size, loop, paths)


def _inner_loops(event: Event, region: Region) -> tuple[Loop, ...]:
    loops = event.context.loops
    return loops[loops.index(region.loop) + 1 :] if region.loop in loops else loops


def _iterates_micro_batches(loop: Loop) -> bool:
    if not isinstance(loop.node, ast.For | ast.AsyncFor):
        return False
    return accumulation_name(loop.node.target) or accumulation_name(loop.node.iter)


def _range_of(node: ast.For | ast.AsyncFor | ast.While) -> ast.expr | None:
    """The n of ``for _ in range(n)``."""
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


def _is_one(size: ast.expr, event: Event) -> bool:
    values = event.frame.values(size)
    return bool(values) and all(value.node is not None and _is_literal(value.node, 1) for value in values)


def _is_literal(node: ast.expr, number: int) -> bool:
    return isinstance(node, ast.Constant) and node.value == number and not isinstance(node.value, bool)
