"""What a file adds to its dictionaries, lists and objects after it made them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, code_of, dotted_text
from ampwise.check.source.outline import FileOutline

KEEPS = LazyPattern(r"^_?(register|add|attach|set|include|track|init|setup|prepare)", re.IGNORECASE)


# Kind, key and value of a change. Kinds are item (``state["a"] = x``), merge (``state.update(x)``), keep
# (``saver.register(x)``) and pass (``f(state)``, where the value is the call).
Change = tuple[str, str, ast.expr]


def key_text(key: ast.expr) -> str:
    """Return a key as text; a computed one in brackets."""
    return str(key.value) if isinstance(key, ast.Constant) else f"[{code_of(key)}]"


def changes_of(name: str, scope: ast.AST, outline: FileOutline) -> list[Change]:
    """Return how a dictionary or an object of this name changes in a function, a class or the file."""
    found = _all_changes(outline).get(name, [])
    if isinstance(scope, ast.Module):
        return found
    first, last = getattr(scope, "lineno", 0), getattr(scope, "end_lineno", 0)
    return [change for change in found if first <= change[2].lineno <= last]


@functools.lru_cache(maxsize=4)  # a file may save several times
def _all_changes(outline: FileOutline) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    for part in outline.script.nodes:
        if isinstance(part, ast.Call):
            changes = _changes_by_call(part)
        elif isinstance(part, ast.Assign):
            changes = _changes_by_assignment(part)
        elif isinstance(part, ast.AugAssign):  # state |= {...}
            changes = [(part.target, "merge", "", part.value)]
        else:
            continue
        for target, kind, key, value in changes:
            name = dotted_text(target)
            if name is not None:
                found.setdefault(name, []).append((kind, key, value))
    return found


def _changes_by_assignment(node: ast.Assign) -> Iterable[tuple[ast.expr, str, str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Subscript):
            inner = target.value
            while isinstance(inner, ast.Subscript):  # state["a"]["b"] = ...
                inner = inner.value
            yield inner, "item", key_text(target.slice), node.value
        elif isinstance(target, ast.Attribute) and dotted_text(target.value) not in ("self", "cls", None):
            yield target.value, "item", target.attr, node.value


def _changes_by_call(call: ast.Call) -> Iterable[tuple[ast.expr, str, str, ast.expr]]:
    given = arguments_given(call)
    if isinstance(call.func, ast.Attribute):
        base, method = call.func.value, call.func.attr
        while isinstance(base, ast.Subscript):  # state["optimizers"].append(...)
            base = base.value
        if method in ("update", "extend"):
            yield from [(base, "merge", "", argument) for argument in call.args]
            yield from [(base, "item" if word.arg else "merge", word.arg or "", word.value) for word in call.keywords]
        elif method in ("setdefault", "append", "insert", "__setitem__") and call.args:
            yield base, "item", key_text(call.args[0]) if len(call.args) > 1 else "", call.args[-1]
        if KEEPS.search(method):
            yield from [(base, "keep", "", argument) for argument in given]
    yield from [(argument, "pass", "", call) for argument in given]
