"""Source code of module classes as syntax trees: what their methods do with attributes of ``self``."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

__all__ = [
    "ForwardSource",
    "MethodSource",
    "attribute_path",
    "is_self_attribute",
    "paths_not_only_called",
    "read_forward",
    "read_methods",
    "words_on_unknown_objects",
]

# Methods that are not part of a forward pass, unless another one calls them.
NOT_RUNNING = {"__init__", "reset_parameters", "extra_repr", "_init_weights"}
# Ways to access a child without naming it.
UNNAMED = {"getattr", "vars", "_modules", "__dict__", "children", "modules", "named_children", "named_modules"}


class MethodSource(NamedTuple):
    """A method of a class, and the name of its first parameter."""

    tree: ast.FunctionDef | ast.AsyncFunctionDef
    receiver: str | None  # None for a static method
    owner: Any  # the class that defines it

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)

    @property
    def of_torch(self) -> bool:
        """Whether torch defines it; torch's methods take apart only what they name."""
        return bool(self.owner.__module__.partition(".")[0] == "torch")


class ForwardSource(NamedTuple):
    """The forward of a class."""

    tree: ast.FunctionDef
    receiver: str  # the name of its first parameter, usually ``self``
    names: Mapping[str, Any]  # global names of its file, without those shadowed by locals
    named: Counter[str]  # how often the class's methods mention each attribute of the module


class _Text(NamedTuple):
    tree: ast.ClassDef
    first_line: int
    file: str


@lru_cache(maxsize=1024)
def read_forward(kind: Any) -> ForwardSource | None:
    """Return the forward that modules of this class run; None if it cannot be read, or may access children unnamed."""
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), nn.Module)
    function, text, methods = vars(owner)["forward"], _text_of(owner), read_methods(kind)
    if not inspect.isfunction(function) or text is None or methods is None:
        return None
    tree = next((node for node in text.tree.body if isinstance(node, ast.FunctionDef) and node.name == "forward"), None)
    if tree is None or function.__code__.co_firstlineno != text.first_line + tree.lineno - 1:
        return None  # decorated, or replaced
    receiver = _receiver(tree)
    if receiver is None or any(_word(node) in UNNAMED for method in methods for node in method.nodes):
        return None
    own = [node for method in methods for node in method.nodes if is_self_attribute(node, method.receiver)]
    named = Counter(node.attr for node in own if isinstance(node, ast.Attribute))
    code = function.__code__
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    names = {name: value for name, value in function.__globals__.items() if name not in local}
    return ForwardSource(tree, receiver, names, named)


@lru_cache(maxsize=1024)
def paths_not_only_called(kind: Any) -> tuple[tuple[str, ...], ...]:
    """Return the paths from a module to what its code loops over, indexes or passes on, rather than calls."""
    found: list[tuple[str, ...]] = []
    for method in read_methods(kind) or ():
        called = {id(node.func) for node in method.nodes if isinstance(node, ast.Call)}
        rest = (node for node in method.nodes if isinstance(node, ast.Attribute) and id(node) not in called)
        found += filter(None, (attribute_path(node, method.receiver) for node in rest))
        found += [()] * (not method.of_torch and any(_word(node) in UNNAMED for node in method.nodes))
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def words_on_unknown_objects(kind: Any) -> frozenset[str]:
    """Return attribute names used on unknown objects, such as ``up`` in ``block.up``; "[" for an index or a loop."""
    found: set[str] = set()
    for method in read_methods(kind) or ():
        for node in method.nodes if not method.of_torch else ():
            if isinstance(node, ast.Attribute) and attribute_path(node, method.receiver) is None:
                found.add(node.attr)
            inner = node.value if isinstance(node, ast.Subscript) and not _is_slice(node.slice) else None
            inner = node.iter if isinstance(node, ast.For | ast.comprehension) else inner
            if inner is not None and attribute_path(inner, method.receiver) is None:
                found.add("[")
    return frozenset(found)


def attribute_path(node: ast.expr, receiver: str | None) -> tuple[str, ...] | None:
    """Return ``("transformer", "wte")`` for ``self.transformer.wte``; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return tuple(reversed(parts)) if isinstance(node, ast.Name) and node.id == receiver else None


def is_self_attribute(node: ast.AST, receiver: str | None) -> bool:
    """Whether it is ``self.something``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == receiver


def _is_slice(node: ast.expr) -> bool:
    """Whether it slices a tensor, rather than indexes a container."""
    return isinstance(node, ast.Slice | ast.Tuple)


def _word(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


@lru_cache(maxsize=1024)
def read_methods(kind: Any) -> tuple[MethodSource, ...] | None:
    """Return the methods of a class and its bases that may run in a forward pass; None if some cannot be read."""
    found: list[MethodSource] = []
    for base in kind.__mro__:
        if base is nn.Module or _is_standard_library(base):
            continue
        text = _text_of(base)
        if text is None or not _has_own_forward(base, text):
            return None
        found += [MethodSource(tree, _receiver(tree), base) for tree in _functions(text.tree)]
    running = [method for method in found if method.tree.name not in NOT_RUNNING]
    named = {_word(node) for method in running for node in method.nodes}
    return tuple(method for method in found if method.tree.name not in NOT_RUNNING - named)


def _is_standard_library(kind: Any) -> bool:
    """Whether a class is from Python's standard library, which has no layers."""
    is_library = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return is_library and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from _functions(node)


def _receiver(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    taken = [*tree.args.posonlyargs, *tree.args.args]
    static = any(_word(each) == "staticmethod" for each in tree.decorator_list)
    return taken[0].arg if taken and not static else None


def _has_own_forward(kind: Any, text: _Text) -> bool:
    """Whether the class's forward is the one in its source, and was not replaced."""
    function = vars(kind).get("forward")
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return function is None
    decorated = any(each.name == "forward" and each.decorator_list for each in _functions(text.tree))
    lines = range(text.first_line, text.first_line + (text.tree.end_lineno or 0))
    return decorated or (code.co_firstlineno in lines and code.co_filename == text.file)


@lru_cache(maxsize=1024)
def _text_of(kind: Any) -> _Text | None:
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):  # defined in a shell, in C, by exec
        return None
    file = inspect.getsourcefile(kind) or ""
    return _Text(tree, first, file) if isinstance(tree, ast.ClassDef) else None
