"""Walks over a syntax tree, as those of ``ast``, in a fraction of the time.

They leave out the nodes that have neither a position nor nodes below them: contexts such as ``Load``, and operators.
"""

from __future__ import annotations

import ast
import functools
from typing import Any

LEAVES = frozenset((ast.Constant, ast.Name, ast.Pass, ast.Break, ast.Continue, ast.alias, ast.Global, ast.Nonlocal))
_MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
_VALUES = (int, str, type(None), bool, float, complex, bytes, type(...))
# By class, since one look into a set is faster than `isinstance` with many classes.
NOT_WALKED = frozenset([*_VALUES, *[kind for mark in _MARKS for kind in mark.__subclasses__()]])
# Fields that never hold a node to walk; those of a name that sometimes does, such as ``value``, are looked at.
_WITHOUT_NODES = (
    *("ctx", "op", "ops", "id", "attr", "arg", "kind", "type_comment", "conversion", "level", "module", "simple"),
    *("is_async", "type_ignores", "rest", "kwd_attrs"),
)
_FIELDS = {
    kind: tuple([name for name in kind._fields if name not in _WITHOUT_NODES])
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below a node, in order of the source."""
    found: list[ast.AST] = []
    held: dict[str, Any] = node.__dict__
    for name in _FIELDS[node.__class__]:
        child: Any = held.get(name)
        kind = child.__class__
        if kind is list:
            if child:
                found += [part for part in child if part.__class__ not in NOT_WALKED]
        elif kind not in NOT_WALKED:
            found.append(child)
    return found


@functools.lru_cache(maxsize=10_000)  # rules walk the same statements, and each once per context
def walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return a node and all nodes below it, each before those below it.

    >>> [type(node).__name__ for node in walk(ast.parse("loss.backward()", mode="eval").body)]
    ['Call', 'Attribute', 'Name']
    """
    found = [node]
    for one in found:  # it grows meanwhile
        if one.__class__ not in LEAVES:
            found += children(one)
    return tuple(found)
