"""The code of modules as trees: what a class's methods say about what ``self`` has."""

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

__all__ = ["Forward", "Method", "forward_of", "is_own", "methods_of", "path_of", "paths_otherwise_used", "words_of"]

# Methods that are no part of a forward pass, unless another one names them.
NOT_RUNNING = {"__init__", "reset_parameters", "extra_repr", "_init_weights"}
# Ways to a child that do not name it.
UNNAMED = {"getattr", "vars", "_modules", "__dict__", "children", "modules", "named_children", "named_modules"}


class Method(NamedTuple):
    """A function of a class, and the name that it has for its module."""

    tree: ast.FunctionDef | ast.AsyncFunctionDef
    receiver: str | None  # None: it has none, as a static method
    owner: Any  # the class that has it

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)

    @property
    def of_torch(self) -> bool:
        """Whether it is one of torch's own, which take apart only what they name."""
        return bool(self.owner.__module__.partition(".")[0] == "torch")


class Forward(NamedTuple):
    """The forward of a class."""

    tree: ast.FunctionDef
    receiver: str  # what it calls its module: mostly ``self``
    names: Mapping[str, Any]  # of its file, by which it knows other things; without those that are its own
    named: Counter[str]  # how often the class's methods name each thing that the module has


class _Text(NamedTuple):
    tree: ast.ClassDef
    first_line: int
    file: str


@lru_cache(maxsize=1024)
def forward_of(kind: Any) -> Forward | None:
    """The forward that modules of this class run; None where it cannot be read, or children be reached unnamed."""
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), nn.Module)
    function, text, methods = vars(owner)["forward"], _text_of(owner), methods_of(kind)
    if not inspect.isfunction(function) or text is None or methods is None:
        return None
    tree = next((node for node in text.tree.body if isinstance(node, ast.FunctionDef) and node.name == "forward"), None)
    if tree is None or function.__code__.co_firstlineno != text.first_line + tree.lineno - 1:
        return None  # decorated, or put there by somebody else
    receiver = _receiver(tree)
    if receiver is None or any(_word(node) in UNNAMED for method in methods for node in method.nodes):
        return None
    named = Counter(node.attr for method in methods for node in method.nodes if is_own(node, method.receiver))  # type: ignore[attr-defined]
    code = function.__code__
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    names = {name: value for name, value in function.__globals__.items() if name not in local}
    return Forward(tree, receiver, names, named)


@lru_cache(maxsize=1024)
def paths_otherwise_used(kind: Any) -> tuple[tuple[str, ...], ...]:
    """The paths from a module to what its code does not call, but loops over, indexes, or hands on."""
    found: list[tuple[str, ...]] = []
    for method in methods_of(kind) or ():
        called = {id(node.func) for node in method.nodes if isinstance(node, ast.Call)}
        rest = (node for node in method.nodes if isinstance(node, ast.Attribute) and id(node) not in called)
        found += filter(None, (path_of(node, method.receiver) for node in rest))
        found += [()] * (not method.of_torch and any(_word(node) in UNNAMED for node in method.nodes))
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def words_of(kind: Any) -> frozenset[str]:
    """What a class's code names on things that are not known: ``up`` of ``block.up``; "[" where one is indexed."""
    found: set[str] = set()
    for method in methods_of(kind) or ():
        for node in method.nodes if not method.of_torch else ():
            if isinstance(node, ast.Attribute) and path_of(node, method.receiver) is None:
                found.add(node.attr)
            inner = node.value if isinstance(node, ast.Subscript) and not _is_slice(node.slice) else None
            inner = node.iter if isinstance(node, ast.For | ast.comprehension) else inner
            if inner is not None and path_of(inner, method.receiver) is None:
                found.add("[")
    return frozenset(found)


def path_of(node: ast.expr, receiver: str | None) -> tuple[str, ...] | None:
    """``("transformer", "wte")`` of ``self.transformer.wte``; None of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return tuple(reversed(parts)) if isinstance(node, ast.Name) and node.id == receiver else None


def is_own(node: ast.AST, receiver: str | None) -> bool:
    """Whether it is ``self.something``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == receiver


def _is_slice(node: ast.expr) -> bool:
    """Of a tensor, that is, and no place in a container."""
    return isinstance(node, ast.Slice | ast.Tuple)


def _word(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


@lru_cache(maxsize=1024)
def methods_of(kind: Any) -> tuple[Method, ...] | None:
    """Those of a class and its bases that may run in a forward pass; None where some cannot be read."""
    found: list[Method] = []
    for base in kind.__mro__:
        if base is nn.Module or _is_of_python(base):
            continue
        text = _text_of(base)
        if text is None or not _is_all_there(base, text):
            return None
        found += [Method(tree, _receiver(tree), base) for tree in _functions(text.tree)]
    running = [method for method in found if method.tree.name not in NOT_RUNNING]
    named = {_word(node) for method in running for node in method.nodes}
    return tuple(method for method in found if method.tree.name not in NOT_RUNNING - named)


def _is_of_python(kind: Any) -> bool:
    """Whether a class is of Python's own library, which knows no layers."""
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


def _is_all_there(kind: Any, text: _Text) -> bool:
    """Whether the forward that the class has is in its text, and was not put there by somebody else."""
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
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):  # made in a shell, in C, by exec
        return None
    file = inspect.getsourcefile(kind) or ""
    return _Text(tree, first, file) if isinstance(tree, ast.ClassDef) else None
