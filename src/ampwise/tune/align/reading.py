"""The code of modules as trees: what a class's methods say about what ``self`` has."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Forward", "forward_of", "is_own", "path_of", "paths_otherwise_used", "paths_read"]

NOT_RUNNING = ("init", "reset", "extra_repr")  # how methods begin that are no part of a forward pass
# Ways to a child that do not name it.
UNNAMED = {"getattr", "vars", "_modules", "__dict__", "children", "modules", "named_children", "named_modules"}


class Forward(NamedTuple):
    """The forward of a class."""

    tree: ast.FunctionDef
    names: Mapping[str, Any]  # of its file, by which it knows other things
    named: Counter[str]  # how often the class's methods name each thing that ``self`` has


class _Text(NamedTuple):
    tree: ast.ClassDef
    first_line: int


@lru_cache(maxsize=1024)
def forward_of(kind: Any) -> Forward | None:
    """The forward that modules of this class run; None where it cannot be read, or children be reached unnamed."""
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), nn.Module)
    function, text, methods = vars(owner)["forward"], _text_of(owner), _methods(kind)
    if not inspect.isfunction(function) or text is None or methods is None:
        return None
    tree = next((node for node in text.tree.body if isinstance(node, ast.FunctionDef) and node.name == "forward"), None)
    if tree is None or function.__code__.co_firstlineno != text.first_line + tree.lineno - 1:
        return None  # decorated, or put there by somebody else
    nodes = [node for method in methods for node in ast.walk(method)]
    if any(_word(node) in UNNAMED for node in nodes):
        return None
    return Forward(tree, function.__globals__, Counter(node.attr for node in nodes if is_own(node)))  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def paths_read(kind: Any) -> tuple[tuple[str, ...], ...]:
    """The paths from ``self`` to modules whose ``weight`` or ``bias`` the class's code asks for."""
    asked = (node.value for node in _attributes(kind) if node.attr in ("weight", "bias"))
    return tuple(filter(None, map(path_of, asked)))


@lru_cache(maxsize=1024)
def paths_otherwise_used(kind: Any) -> tuple[tuple[str, ...], ...]:
    """The paths from ``self`` to what is not called, but looped over, indexed, or handed on."""
    called = {
        id(node.func) for method in _methods(kind) or () for node in ast.walk(method) if isinstance(node, ast.Call)
    }
    return tuple(filter(None, (path_of(node) for node in _attributes(kind) if id(node) not in called)))


def path_of(node: ast.expr) -> tuple[str, ...]:
    """``("transformer", "wte")`` of ``self.transformer.wte``; nothing of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return tuple(reversed(parts)) if isinstance(node, ast.Name) and node.id == "self" else ()


def is_own(node: ast.AST) -> bool:
    """Whether it is ``self.something``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _attributes(kind: Any) -> Iterator[ast.Attribute]:
    for method in _methods(kind) or ():
        yield from (node for node in ast.walk(method) if isinstance(node, ast.Attribute))


def _word(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


@lru_cache(maxsize=1024)
def _methods(kind: Any) -> tuple[ast.FunctionDef, ...] | None:
    """Those of a class and its bases that may run in a forward pass; None where some cannot be read."""
    found: list[ast.FunctionDef] = []
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        text = _text_of(base)
        if text is None:
            return None
        functions = (node for node in text.tree.body if isinstance(node, ast.FunctionDef))
        found += [node for node in functions if not node.name.strip("_").startswith(NOT_RUNNING)]
    return tuple(found)


@lru_cache(maxsize=1024)
def _text_of(kind: Any) -> _Text | None:
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):  # made in a shell, in C, by exec
        return None
    return _Text(tree, first) if isinstance(tree, ast.ClassDef) else None
