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

MOST_BINDINGS = 200  # a name that is assigned more often is treated as unknown
LOOPS = (ast.For, ast.AsyncFor, ast.While)
MAY_NOT_RUN = (ast.With, ast.AsyncWith, ast.For, ast.AsyncFor)  # statements that bind a name before their body
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
Home = tuple[int, str]  # a compound statement, and which of its blocks


def reaching_values(node: ast.Name, frame: Frame) -> list[PossibleValue]:
    """Return the values that ``node`` may hold at its place; its node is None for an unknown one."""
    function, unknown = frame.function, PossibleValue(None, frame)
    if not function.holds(node.id):
        return [value if value.node is not node else unknown for value in frame.values(node)]
    found = [(_bound(binding, node.id), binding.node) for binding in function.bindings.get(node.id, ())]
    bindings = [(value, statement) for value, statement in found if isinstance(statement, ast.stmt)]
    if len(bindings) > MOST_BINDINGS:
        return [unknown]
    homes = _homes(function)
    around = _blocks_around(node, function)
    newest: dict[Home | None, int] = {}  # the line of the last assignment in each block
    last: ast.stmt | None = None  # the last of the assignments that every path to the name goes through
    for _, statement in bindings:
        is_before = (statement.end_lineno or 0) < node.lineno and not isinstance(statement, MAY_NOT_RUN)
        if not is_before:
            continue
        home = homes.get(id(statement))
        newest[home] = max(newest.get(home, 0), statement.lineno)
        if home in around and (last is None or statement.lineno > last.lineno):
            last = statement
    loops = [loop for loop in around.values() if isinstance(loop, LOOPS)]
    values = []
    for value, statement in bindings:
        if last is not None and statement.lineno < last.lineno:
            continue
        if newest.get(homes.get(id(statement)), 0) > statement.lineno and id(statement) in homes:
            continue  # further down in its block, before the name, there is another one
        is_before = (statement.end_lineno or 0) < node.lineno or isinstance(statement, LOOPS)
        # Or further down, but in a loop whose next iteration reaches the name without passing the last assignment.
        if is_before or any(_within(statement, loop) and not (last and _within(last, loop)) for loop in loops):
            values.append(PossibleValue(value, frame))
    if last is None and node.id in function.params:
        is_given = node.id in frame.arguments and frame.caller is not None
        values.append(PossibleValue(frame.arguments[node.id], frame.caller) if is_given else unknown)  # type: ignore[arg-type]
    return values or [unknown]


@functools.lru_cache(maxsize=1024)  # the same node each time, since dtypes are known by node
def _bound(binding: Binding, name: str) -> ast.expr | None:
    """Return the value of a binding; ``made[0]`` for the first name in ``scores, features = made``."""
    statement = binding.node
    if binding.value is not None or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return binding.value
    parts = statement.targets[0].elts if isinstance(statement.targets[0], ast.Tuple | ast.List) else []
    if any(isinstance(part, ast.Starred) for part in parts):
        return None
    index = next((number for number, part in enumerate(parts) if isinstance(part, ast.Name) and part.id == name), None)
    if index is None:
        return None
    element = ast.Subscript(statement.value, ast.Constant(index), ast.Load())
    return ast.fix_missing_locations(ast.copy_location(element, statement.value))


def _within(node: ast.stmt, outer: ast.stmt) -> bool:
    return outer.lineno <= node.lineno <= (outer.end_lineno or 0)


def _blocks_around(node: ast.Name, function: FunctionOutline) -> dict[Home, ast.AST]:
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
def _homes(function: FunctionOutline) -> dict[int, Home]:
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
