"""Conditions under which two statements of a function run, which decide whether a fix that adds a statement is safe.

A fix that cannot be proven safe here is offered as an unsafe one.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.check.source.events import SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import Binding
from ampwise.check.source.project import SourceFile
from ampwise.check.source.script import SourceScript
from ampwise.check.source.torch_names import GRAD_SCALERS
from ampwise.check.source.tree_walk import walk

BLOCKS = ("body", "orelse", "finalbody")
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
LOOPS = ast.For | ast.AsyncFor | ast.While
OPPOSITES = {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


@dataclass
class StatementRange:
    """Statements of one block, from the one that contains an event to a later one."""

    statements: list[ast.stmt]

    @property
    def first(self) -> ast.stmt:
        return self.statements[0]

    @property
    def starts_plainly(self) -> bool:
        """Whether the first statement is a simple statement without a body."""
        return not any(hasattr(self.first, name) for name in BLOCKS)

    def is_in_first(self, event: SourceEvent) -> bool:
        """Whether the first statement also contains ``event``."""
        return event.node in walk(self.first)  # nodes are equal only to themselves

    @property
    def may_be_left(self) -> bool:
        """Whether the last statement may not be reached after the first, or only after a ``yield``."""
        pending: list[tuple[ast.AST, bool]] = [(statement, False) for statement in self.statements[:-1]]
        while pending:
            node, in_loop = pending.pop()
            if isinstance(node, ast.Return | ast.Raise | ast.Yield | ast.YieldFrom | ast.Await):
                return True
            if isinstance(node, ast.Break | ast.Continue) and not in_loop:
                return True
            if not isinstance(node, SCOPES):
                is_loop = isinstance(node, LOOPS)
                pending += zip(ast.iter_child_nodes(node), itertools.repeat(in_loop or is_loop))
        return False

    def rebinds(self, *names: str) -> bool:
        """Whether one of these dotted names is assigned in these statements."""
        for node in [node for statement in self.statements for node in walk(statement)]:
            if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
                stored = dotted_text(node)
                if stored and any(name == stored or name.startswith(f"{stored}.") for name in names):
                    return True
        return False


def statement_range(event: SourceEvent, end: SourceEvent) -> StatementRange | None:
    """Return the statements from ``event`` to ``end`` in the block of ``end``; None if they are not in one block.

    ``end`` must be a whole statement: ``scaler and scaler.step(optimizer)`` may not call ``step``.
    """
    script = end.frame.outline.script
    block, last = next(_blocks_around(script, end.node), ([], 0))
    if not block or event.frame is not end.frame:
        return None
    whole = block[last]
    if not isinstance(whole, ast.Expr | ast.Assign | ast.Return) or whole.value is not end.node:
        return None
    for other, first in _blocks_around(script, event.node):
        if other is block:
            return StatementRange(block[first : last + 1]) if first <= last else None
    return None


def block_after(event: SourceEvent, script: SourceScript) -> list[ast.stmt]:
    """Return the statements after the one of ``event`` in its block."""
    block, index = next(_blocks_around(script, event.node), ([], 0))
    return block[index + 1 :]


def range_to_guard(event: SourceEvent, end: SourceEvent) -> tuple[StatementRange, ast.If, str] | None:
    """Return the statements from ``event`` to ``end`` if ``end`` alone is in an ``if``, this ``if``, and its condition.

    So it is in ``clip(...)``, then ``if use_amp: scaler.step(optimizer)``; in an ``else``, the condition is negated.
    None if there is not exactly one ``if`` between them, or its test may have another value by then.
    """
    script = end.frame.outline.script
    own = statement_range(end, end)
    guard = script.parents.get(own.first) if own is not None else None
    if own is None or not isinstance(guard, ast.If) or event.frame is not end.frame:
        return None
    parts = list(walk(guard.test))
    if any(isinstance(part, ast.Call | ast.NamedExpr | ast.Await | ast.Yield) for part in parts):
        return None
    body, condition = guard.body, script.segment(guard.test)
    if own.first not in body:
        body, condition = guard.orelse, ast.unparse(_negated(guard.test))
    for block, first in _blocks_around(script, event.node):
        if guard in block and first < block.index(guard):
            found = StatementRange([*block[first : block.index(guard)], *body[: body.index(own.first) + 1]])
            tested = [text for part in parts if (text := dotted_text(part))]
            return None if found.rebinds(*tested) else (found, guard, condition)
    return None


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in OPPOSITES:
        return ast.Compare(test.left, [OPPOSITES[type(test.ops[0])]()], test.comparators)
    return ast.UnaryOp(ast.Not(), test)


def range_beside(earlier: SourceEvent, event: SourceEvent, end: SourceEvent) -> StatementRange | None:
    """Return the statements from ``event`` on in the block of ``earlier``, if ``earlier`` and ``end`` run together.

    So it is with a backward and a clip in ``if use_amp:``, and the step in a second ``if use_amp:``. The first
    statement is the one that contains ``event``; then come those up to ``end``.
    """
    script = end.frame.outline.script
    is_one = earlier.frame is event.frame is end.frame and earlier.context.loops == end.context.loops
    if not is_one or set(earlier.context.guards) != set(end.context.guards):
        return None
    block, place = next(_blocks_around(script, earlier.node), ([], 0))
    around = [index for other, index in _blocks_around(script, event.node) if other is block]
    is_whole = bool(block) and getattr(block[place], "value", None) is earlier.node  # not `a and loss.backward()`
    if not is_whole or not around or around[0] <= place or statement_range(end, end) is None:
        return None
    ends = list(_blocks_around(script, end.node))
    for outer, first in _blocks_around(script, block[0]):
        last = next((index for other, index in ends if other is outer), first)
        if last > first:
            found = StatementRange([*block[around[0] :], *outer[first + 1 : last + 1]])
            tests = [guard.test for guard in end.context.guards if guard.test is not None]
            tested = [text for test in tests for part in walk(test) if (text := dotted_text(part))]
            return None if found.rebinds(*tested) else found
    return None


def runs_before(script: SourceScript, statement: ast.AST, node: ast.AST) -> bool:
    """Whether ``statement`` always runs before ``node`` in the same pass."""
    return any(statement in block[:index] for block, index in _blocks_around(script, node))


def is_certainly_grad_scaler(step: SourceEvent, code: SourceFile) -> bool:
    """Whether the scaler of ``scaler.step(optimizer)`` is torch's or None in every known call of the function."""
    frames = [site.context.frame for trace in code.traces for site in trace.calls if site.node is step.node]
    function = step.frame.function
    root = (dotted_text(step.receiver) or "").partition(".")[0]
    if root in function.params and function.self_name is None:
        # The scaler is an argument; code we cannot see may call the function if its name is used other than in a call.
        nodes = function.outline.script.nodes
        called = {node.func for node in nodes if isinstance(node, ast.Call)}
        named = [node for node in nodes if isinstance(node, ast.Name) and node.id == function.name]
        if any(node not in called for node in named):
            return False
    return bool(frames) and all(_is_grad_scaler(step.receiver, frame) for frame in frames)


def is_always_bound(step: SourceEvent) -> bool:
    """Whether the scaler's name is always assigned, and never None."""
    values = [value.node for value in step.frame.values(step.receiver)]
    if any(not isinstance(value, ast.Call) for value in values):
        return False
    return not any(binding.guarded for binding in _bindings(step.receiver, step.frame))


def may_be_retried(event: SourceEvent) -> bool:
    """Whether an exception after ``event`` may be caught so that training continues."""
    caught = False
    node: ast.AST = event.node
    for frame in event.frame.callers():
        for outer in _outer(frame.outline.script, node):
            if isinstance(outer, SCOPES):
                break
            if isinstance(outer, ast.Try | ast.TryStar):
                caught = caught or bool(outer.handlers)
            elif isinstance(outer, ast.With | ast.AsyncWith):
                caught = caught or any("suppress" in ast.unparse(item.context_expr) for item in outer.items)
            elif isinstance(outer, LOOPS) and caught:
                return True
        if frame.call is not None:
            node = frame.call
    # A caller we cannot see may call the function in a loop.
    return caught and not isinstance(frame.function.node, ast.Module)


def _is_grad_scaler(node: ast.expr, frame: Frame) -> bool:
    values = frame.values(node)
    for value, home in values:
        is_none = isinstance(value, ast.Constant) and value.value is None
        if not is_none and not (isinstance(value, ast.Call) and home.qualified(value.func) in GRAD_SCALERS):
            return False
    if not isinstance(node, ast.Attribute):
        return bool(values)
    # Code outside of the class may assign the attribute, as in `trainer.scaler = ...`.
    return bool(values) and _stores(frame.outline.script)[node.attr] == len(_bindings(node, frame))


@functools.lru_cache(maxsize=8)  # used for every scaler of a file
def _stores(script: SourceScript) -> collections.Counter[str]:
    """Return how often each attribute is assigned in a file."""
    attributes = [node for node in script.nodes if isinstance(node, ast.Attribute)]
    return collections.Counter([node.attr for node in attributes if isinstance(node.ctx, ast.Store)])


def _bindings(node: ast.expr, frame: Frame) -> list[Binding]:
    if isinstance(node, ast.Attribute):
        owner = frame.class_of(node.value)
        return frame.attribute_bindings(owner, node.attr) if owner is not None else []
    if not isinstance(node, ast.Name):
        return []
    return [binding for function in frame.function.scopes for binding in function.bindings.get(node.id, ())]


def _outer(script: SourceScript, node: ast.AST) -> Iterator[ast.AST]:
    parents = script.parents
    while node in parents:
        node = parents[node]
        yield node


def _blocks_around(script: SourceScript, node: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield the blocks of the same function that contain a node, innermost first, with its index in each."""
    inner = node
    for outer in _outer(script, node):
        if isinstance(inner, ast.stmt):
            for block in [getattr(outer, name, None) for name in BLOCKS]:
                if isinstance(block, list) and inner in block:
                    yield block, block.index(inner)
        if isinstance(outer, SCOPES):
            return
        inner = outer
