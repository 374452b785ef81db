"""Reaching definitions: the assignments that may give a name its value at one place.

``Frame.values`` returns everything that is ever assigned to a name. Here the order counts: after ``x = x.float()``
the earlier value of ``x`` is gone.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.frame import Frame, PossibleValue
from ampwise.check.source.outline import Binding, FunctionOutline

__all__ = ["reaching_values"]

MOST_BINDINGS = 200  # a name that is assigned more often is treated as unknown
LOOPS = (ast.For, ast.AsyncFor, ast.While)
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
Home = tuple[int, str]  # a compound statement, and which of its blocks


def reaching_values(node: ast.Name, frame: Frame) -> list[PossibleValue]:
    """Return the values that ``node`` may hold at its place; Value(None) for an unknown one."""
    function = frame.function
    if node.id in function.outside or not function.holds(node.id):
        values = frame.values(node)
        return [value if value.node is not node else PossibleValue(None, frame) for value in values]
    bindings = [binding for binding in function.bindings.get(node.id, ()) if isinstance(binding.node, ast.stmt)]
    if len(bindings) > MOST_BINDINGS:
        return [PossibleValue(None, frame)]
    chains = _chains(function)
    around = _around(node, function)
    hiding = [binding for binding in bindings if _always_before(binding, node, around, chains)]
    last = max(hiding, key=lambda binding: _line(binding), default=None)
    found = [binding for binding in bindings if _may_reach(binding, last, node, around)]
    values = [PossibleValue(binding.value, frame) for binding in found]
    if last is None and node.id in function.params:
        values += _given(node.id, frame)
    return values or [PossibleValue(None, frame)]


def _given(name: str, frame: Frame) -> list[PossibleValue]:
    if name in frame.arguments and frame.caller is not None:
        return [PossibleValue(frame.arguments[name], frame.caller)]
    return [PossibleValue(None, frame)]


def _line(binding: Binding) -> int:
    assert isinstance(binding.node, ast.stmt)
    return binding.node.lineno


def _always_before(binding: Binding, node: ast.Name, around: dict[Home, ast.AST], chains: dict[int, Home]) -> bool:
    """Whether every path to ``node`` goes through this assignment."""
    assert isinstance(binding.node, ast.stmt)
    if isinstance(binding.node, ast.With | ast.AsyncWith | ast.For | ast.AsyncFor):
        return False
    return (binding.node.end_lineno or 0) < node.lineno and chains.get(id(binding.node)) in around


def _may_reach(binding: Binding, last: Binding | None, node: ast.Name, around: dict[Home, ast.AST]) -> bool:
    if last is not None and _line(binding) < _line(last):
        return False
    assert isinstance(binding.node, ast.stmt)
    if (binding.node.end_lineno or 0) < node.lineno or isinstance(binding.node, LOOPS):
        return True
    # Further down, but in a loop whose next iteration reaches the name without passing the last assignment.
    loops = [loop for loop in around.values() if isinstance(loop, LOOPS)]
    return any(_within(binding.node, loop) and not (last and _within(last.node, loop)) for loop in loops)


def _within(node: ast.AST, outer: ast.AST) -> bool:
    line, first, end = (getattr(node, "lineno", 0), getattr(outer, "lineno", 0), getattr(outer, "end_lineno", 0))
    return bool(first <= line <= end)


def _around(node: ast.Name, function: FunctionOutline) -> dict[Home, ast.AST]:
    """Return the blocks that contain ``node``, from the function's own inwards, each with its compound statement."""
    found: dict[Home, ast.AST] = {}
    outer: ast.AST | None = function.node
    while outer is not None:
        inner = None
        for name, statement in _children(outer):
            if statement.lineno <= node.lineno <= (statement.end_lineno or 0):
                found[(id(outer), name)] = outer
                inner = statement
        outer = inner
    return found


def _children(outer: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for name in BLOCKS:
        for child in getattr(outer, name, ()):
            if isinstance(child, ast.stmt):
                yield name, child
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                for below in child.body:
                    yield f"{name} {id(child)}", below


@functools.lru_cache(maxsize=64)
def _chains(function: FunctionOutline) -> dict[int, Home]:
    """Return the block of each statement of a function; the body of a ``with`` belongs to the outer block."""
    homes: dict[int, Home] = {}
    pending: list[tuple[ast.AST, Home | None]] = [(function.node, None)]
    while pending:
        outer, through = pending.pop()
        for name, statement in _children(outer):
            home = through or (id(outer), name)
            homes[id(statement)] = home
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                is_with = isinstance(statement, ast.With | ast.AsyncWith)
                pending.append((statement, home if is_with else None))
    return homes
