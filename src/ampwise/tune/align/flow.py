"""What becomes of a layer's output inside its block, as the block's code says.

A hidden size may stay padded between two layers where it is certain that nothing else sees it: what the one gives
goes, through functions that keep zero, into the other, and nowhere else. That is certain inside an ``nn.Sequential``,
and where a ``forward`` says so on every way through it. Code that cannot be read, or is not as plain as this, proves
nothing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ampwise.tune.align.raw import at
from ampwise.tune.align.reading import Forward, forward_of, is_own, paths_otherwise_used, words_of

__all__ = ["Chain", "chains", "has_hooks", "taken_apart"]

# Each value by itself, and zero to zero.
POINTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Tanh,
    nn.Hardswish, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
)  # fmt: skip
# They keep zero, whatever else they are given.
FUNCTIONS = (
    F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.tanh, F.hardswish, F.softsign,
    F.tanhshrink, F.softshrink, F.hardshrink, torch.relu, torch.tanh, torch.square,
)  # fmt: skip
METHODS = ("relu", "tanh", "square")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Where a name may stand for something else, or its value come again.
OTHER_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NOT_STRAIGHT = (ast.For, ast.While, ast.Try, ast.FunctionDef, ast.ClassDef, ast.Match)


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers whose outputs, put together value by value, go into one other layer and nowhere else."""

    sources: tuple[nn.Module, ...]
    into: nn.Module


def chains(module: nn.Module) -> Iterator[Chain]:
    """Those among a module's own children."""
    if "forward" in vars(module):  # another than its class's
        return
    if type(module) is nn.Sequential:
        yield from _in_sequence(list(module))
        return
    kind: Any = type(module)
    code = forward_of(kind)
    if code is not None:
        yield from _Reader(module, code).chains()


def taken_apart(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that this one's code does more with than to call them: what is in them may be used by itself."""
    kind: Any = type(module)
    words = words_of(kind)
    for path in paths_otherwise_used(kind):
        used = at(module, path)
        if isinstance(used, nn.Module):
            if path:
                yield used
            yield from (inner for inner in used.modules() if inner is not module and _is_opened(inner, words))


def _is_opened(module: nn.Module, words: Set[str]) -> bool:
    """Whether code with these words may reach what is in a module."""
    return not words.isdisjoint(module._modules) or ("[" in words and isinstance(module, nn.Sequential))


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody else sees what goes in or comes out, or has put another forward there."""
    return any(getattr(module, kind) for kind in HOOKS) or "forward" in vars(module)


def _keeps_zero(module: Any) -> bool:
    keeps = type(module) in POINTWISE
    if type(module) is nn.Hardtanh:
        keeps = module.min_val <= 0 <= module.max_val
    elif type(module) is nn.Dropout:  # one that drops would draw other random numbers where there are more values
        keeps = module.p == 0
    elif isinstance(module, nn.Module) and not keeps:
        keeps = _is_only_a_function(module)
    return keeps and not has_hooks(module)


def _is_only_a_function(module: nn.Module) -> bool:
    """Whether its forward is ``return F.silu(input)``, or the same by a function that it has, as libraries write it."""
    kind: Any = type(module)
    code = forward_of(kind)
    last = code.tree.body[-1] if code is not None and len(code.tree.body) == 1 else None
    call = last.value if isinstance(last, ast.Return) else None
    if code is None or not isinstance(call, ast.Call) or not _has_one_argument(call):
        return False
    taken = [each.arg for each in code.tree.args.args]
    argument, called = call.args[0], call.func
    function = _known_as(called, code.names)
    if isinstance(called, ast.Attribute) and is_own(called, code.receiver):
        function = vars(module).get(called.attr)
    keeps = getattr(function, "func", function) in FUNCTIONS  # of a functools.partial, what it calls
    return keeps and len(taken) == 2 and isinstance(argument, ast.Name) and argument.id == taken[1]


def _gives(module: Any) -> bool:
    return type(module) in (nn.Linear, nn.Embedding) and not has_hooks(module)


def _takes(module: Any) -> bool:
    return type(module) is nn.Linear and not has_hooks(module)


def _in_sequence(children: Sequence[nn.Module]) -> Iterator[Chain]:
    source: nn.Module | None = None
    for child in children:
        if source is not None and _takes(child):
            yield Chain((source,), child)
        if _gives(child):
            source = child
        elif not _keeps_zero(child):
            source = None


class _Reader:
    """Reads one forward, for one module of its class."""

    def __init__(self, module: nn.Module, code: Forward) -> None:
        self._module, self._code = module, code
        self._parents = {child: node for node in ast.walk(code.tree) for child in ast.iter_child_nodes(node)}

    def chains(self) -> Iterator[Chain]:
        for node in ast.walk(self._code.tree):
            if isinstance(node, ast.Call) and _has_one_argument(node) and _takes(self._child(node.func, once=True)):
                sources = self._sources(node.args[0])
                if sources:
                    yield Chain(tuple(sources), self._child(node.func))

    def _child(self, node: ast.expr, *, once: bool = False) -> Any:
        """The module that ``self.name`` is; with ``once`` only if that is all the class's code says about it."""
        if not isinstance(node, ast.Attribute) or not is_own(node, self._code.receiver):
            return None
        return None if once and self._code.named[node.attr] != 1 else self._module._modules.get(node.attr)

    def _sources(self, node: ast.expr) -> list[nn.Module]:
        """The layers whose outputs this value is made of, zero wherever they are; none if it is anything else."""
        if isinstance(node, ast.Call):
            return self._sources_of_call(node)
        if isinstance(node, ast.BinOp):
            return self._sources_of_both(node)
        value = self._only_value(node) if isinstance(node, ast.Name) else None
        return [] if value is None else self._sources(value)

    def _sources_of_call(self, node: ast.Call) -> list[nn.Module]:
        layer = self._child(node.func, once=True)
        if _gives(layer):
            return [layer]
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and not node.args:
            return self._sources(node.func.value)
        keeps = _keeps_zero(self._child(node.func)) or _known_as(node.func, self._code.names) in FUNCTIONS
        return self._sources(node.args[0]) if keeps and node.args else []

    def _sources_of_both(self, node: ast.BinOp) -> list[nn.Module]:
        left, right = self._sources(node.left), self._sources(node.right)
        if isinstance(node.op, ast.Mult) and (_is_number(node.left) or _is_number(node.right)):
            return left or right
        both = isinstance(node.op, ast.Mult | ast.Add | ast.Sub) and left and right
        return [*left, *right] if both else []

    def _only_value(self, name: ast.Name) -> ast.expr | None:
        """What a variable was given, if that is just before, and this is the only place that reads it."""
        here, block = self._statement(name)
        if block is None:
            return None
        before = next((each for each in reversed(block[: block.index(here)]) if _mentions(each, name.id)), None)
        if before is None or not _assigns(before, name.id):
            return None
        given_anew = _assigns(here, name.id)
        if _mentions(here, name.id) != 1 + given_anew:
            return None
        return before.value if given_anew or not self._read_after(here, name.id) else None  # type: ignore[attr-defined]

    def _read_after(self, here: ast.stmt, name: str) -> bool:
        end = here.end_lineno or here.lineno, here.end_col_offset or 0
        found = (node for node in ast.walk(self._code.tree) if isinstance(node, ast.Name) and node.id == name)
        return any((node.lineno, node.col_offset) >= end for node in found)

    def _statement(self, node: ast.AST) -> tuple[ast.stmt, list[ast.stmt] | None]:
        """The statement a node is in and those it is one of, one after the other; None where that is not so."""
        inside = [node]
        while not isinstance(inside[-1], ast.stmt):
            inside.append(self._parents[inside[-1]])
        statement = inside[-1]
        around: list[ast.AST] = [statement]
        while around[-1] is not self._code.tree:
            around.append(self._parents[around[-1]])
        straight = isinstance(statement, ast.Assign | ast.Return | ast.Expr)
        if not straight or _any(inside, OTHER_SCOPES) or _any(around[:-1], NOT_STRAIGHT):
            return statement, None
        blocks = (value for _, value in ast.iter_fields(around[1]) if isinstance(value, list))
        return statement, next(block for block in blocks if statement in block)


def _known_as(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The function that ``F.gelu`` stands for in a file."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    found = names.get(node.id) if isinstance(node, ast.Name) else None
    for part in reversed(parts):
        found = getattr(found, part, None)
    return found if inspect.isroutine(found) else None


def _any(nodes: Sequence[ast.AST], kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(node, kinds) for node in nodes)


def _has_one_argument(node: ast.Call) -> bool:
    return len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _mentions(node: ast.AST, name: str) -> int:
    return sum(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _assigns(node: ast.stmt, name: str) -> bool:
    """Whether it is ``name = …`` and no more."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    target = node.targets[0]
    return isinstance(target, ast.Name) and target.id == name
