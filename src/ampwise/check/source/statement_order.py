"""Conditions under which two statements of a function run, which decide whether a fix that adds a statement is safe.

A fix that cannot be proven safe here is offered as an unsafe one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.events import SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import Binding
from ampwise.check.source.project import SourceFile
from ampwise.check.source.script import SourceScript
from ampwise.check.source.torch_names import GRAD_SCALERS

__all__ = [
    "StatementRange",
    "is_always_bound",
    "is_certainly_grad_scaler",
    "may_be_retried",
    "runs_before",
    "statement_range",
]

BLOCKS = ("body", "orelse", "finalbody")
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
LOOPS = ast.For | ast.AsyncFor | ast.While


class StatementRange:
    """Statements of one block, from the one that contains an event to a later one."""

    def __init__(self, statements: list[ast.stmt]) -> None:
        self.statements = statements

    @property
    def first(self) -> ast.stmt:
        return self.statements[0]

    @property
    def starts_plainly(self) -> bool:
        """Whether the first statement is a simple statement without a body."""
        return not any(hasattr(self.first, name) for name in BLOCKS)

    def is_in_first(self, event: SourceEvent) -> bool:
        """Whether the first statement also contains ``event``."""
        return _holds(self.first, event.node)

    @property
    def may_be_left(self) -> bool:
        """Whether the last statement may not be reached after the first."""
        return any(_leaves(statement) for statement in self.statements[:-1])

    def rebinds(self, *names: str) -> bool:
        """Whether one of these dotted names is assigned in these statements."""
        stored = (
            dotted_text(node)
            for statement in self.statements
            for node in ast.walk(statement)
            if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load)
        )
        return any(name == one or name.startswith(f"{one}.") for one in stored if one for name in names)


def statement_range(event: SourceEvent, end: SourceEvent) -> StatementRange | None:
    """Return the statements from ``event`` to ``end`` in the block of ``end``; None if they are not in one block.

    ``end`` must be a whole statement: ``scaler and scaler.step(optimizer)`` may not call ``step``.
    """
    script = end.frame.outline.script
    ends = next(_blocks_around(script, end.node), None)
    if ends is None or event.frame is not end.frame:
        return None
    block, last = ends
    if not isinstance(block[last], ast.Expr | ast.Assign | ast.Return) or block[last].value is not end.node:  # type: ignore[attr-defined]
        return None
    for other, first in _blocks_around(script, event.node):
        if other is block:
            return StatementRange(block[first : last + 1]) if first <= last else None
    return None


def runs_before(script: SourceScript, statement: ast.AST, node: ast.AST) -> bool:
    """Whether ``statement`` always runs before ``node`` in the same pass."""
    return any(each is statement for block, index in _blocks_around(script, node) for each in block[:index])


def is_certainly_grad_scaler(step: SourceEvent, code: SourceFile) -> bool:
    """Whether the scaler of ``scaler.step(optimizer)`` is torch's or None in every known call of the function."""
    frames = [site.context.frame for trace in code.traces for site in trace.calls if site.node is step.node]
    if _may_be_called_unseen(step):
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
            caught = caught or _catches(outer)
            if isinstance(outer, LOOPS) and caught:
                return True
        if frame.call is not None:
            node = frame.call
    # A caller we cannot see may call the function in a loop.
    return caught and not isinstance(frame.function.node, ast.Module)


def _is_grad_scaler(node: ast.expr, frame: Frame) -> bool:
    values = frame.values(node)
    known = [
        (isinstance(value.node, ast.Constant) and value.node.value is None)
        or (isinstance(value.node, ast.Call) and value.frame.qualified(value.node.func) in GRAD_SCALERS)
        for value in values
    ]
    return bool(known) and all(known) and not _is_set_from_elsewhere(node, frame)


def _may_be_called_unseen(step: SourceEvent) -> bool:
    """Whether the scaler is an argument of a function that code we cannot see may call."""
    function = step.frame.function
    if (dotted_text(step.receiver) or "").partition(".")[0] not in function.params or function.self_name is not None:
        return False
    nodes = list(ast.walk(function.outline.script.tree))
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    named = (node for node in nodes if isinstance(node, ast.Name) and node.id == function.name)
    return any(node not in called for node in named)


def _is_set_from_elsewhere(node: ast.expr, frame: Frame) -> bool:
    """Whether code outside of the class assigns the attribute, as in ``trainer.scaler = ...``."""
    if not isinstance(node, ast.Attribute):
        return False
    stores = [
        found
        for found in ast.walk(frame.outline.script.tree)
        if isinstance(found, ast.Attribute) and found.attr == node.attr and isinstance(found.ctx, ast.Store)
    ]
    return len(stores) != len(_bindings(node, frame))


def _bindings(node: ast.expr, frame: Frame) -> list[Binding]:
    if isinstance(node, ast.Attribute):
        owner = frame.class_of(node.value)
        classes = frame.ancestry(owner) if owner is not None else ()
        return [binding for cls in classes for binding in cls.attributes.get(node.attr, ())]
    if not isinstance(node, ast.Name):
        return []
    return [binding for function in frame.function.chain() for binding in function.bindings.get(node.id, ())]


# Parents and blocks of a node.


@functools.lru_cache(maxsize=4)  # for the few files that have findings to fix
def _parents(script: SourceScript) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(script.tree) for child in ast.iter_child_nodes(node)}


def _outer(script: SourceScript, node: ast.AST) -> Iterator[ast.AST]:
    parents = _parents(script)
    while node in parents:
        node = parents[node]
        yield node


def _blocks_around(script: SourceScript, node: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield the blocks of the same function that contain a node, innermost first, with its index in each."""
    inner = node
    for outer in _outer(script, node):
        if isinstance(inner, ast.stmt):
            for block in (getattr(outer, name, None) for name in BLOCKS):
                if isinstance(block, list) and any(statement is inner for statement in block):
                    yield block, next(index for index, statement in enumerate(block) if statement is inner)
        if isinstance(outer, SCOPES):
            return
        inner = outer


def _holds(statement: ast.AST, node: ast.AST) -> bool:
    return any(each is node for each in ast.walk(statement))


def _leaves(node: ast.AST, in_loop: bool = False) -> bool:
    """Whether a statement may skip those after it, or suspend before them (``yield``)."""
    if isinstance(node, ast.Return | ast.Raise | ast.Yield | ast.YieldFrom | ast.Await):
        return True
    if isinstance(node, ast.Break | ast.Continue):
        return not in_loop
    if isinstance(node, SCOPES):
        return False
    in_loop = in_loop or isinstance(node, LOOPS)
    return any(_leaves(child, in_loop) for child in ast.iter_child_nodes(node))


def _catches(node: ast.AST) -> bool:
    if isinstance(node, ast.Try | ast.TryStar):
        return bool(node.handlers)
    if isinstance(node, ast.With | ast.AsyncWith):
        return any("suppress" in ast.unparse(item.context_expr) for item in node.items)
    return False
