"""Find where a layer's output goes inside its block, by reading the block's code.

A hidden size may stay padded between two layers if provably nothing else sees it: the output of the first goes,
through functions that map zero to zero, into the second and nowhere else. That holds inside an ``nn.Sequential``,
and where every path through a ``forward`` shows it. Code that cannot be read, or is less simple, proves nothing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ampwise.tune.align.module_source import (
    ForwardSource,
    follow_path,
    is_self_attribute,
    paths_not_only_called,
    read_forward,
    words_on_unknown_objects,
)

# Elementwise modules that map zero to zero.
POINTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Tanh,
    nn.Hardswish, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
)  # fmt: skip
# Functions that map zero to zero, whatever their other arguments.
FUNCTIONS = (
    F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.tanh, F.hardswish, F.softsign,
    F.tanhshrink, F.softshrink, F.hardshrink, torch.relu, torch.tanh, torch.square,
)  # fmt: skip
METHODS = ("relu", "tanh", "square")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Scopes in which a name may mean something else, or be evaluated more than once.
OTHER_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NOT_STRAIGHT_LINE = (ast.For, ast.While, ast.Try, ast.FunctionDef, ast.ClassDef, ast.Match)


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers whose outputs, combined elementwise, go into one other layer and nowhere else."""

    sources: tuple[nn.Module, ...]
    into: nn.Module


def find_chains(module: nn.Module) -> Iterator[Chain]:
    """Yield the chains among a module's direct children."""
    if "forward" in vars(module):  # replaced on the instance
        return
    if type(module) is nn.Sequential:
        source: nn.Module | None = None
        for child in module:
            if source is not None and _is_sink(child):
                yield Chain((source,), child)
            if _is_source(child):
                source = child
            elif not _keeps_zero(child):
                source = None
        return
    kind: Any = type(module)
    code = read_forward(kind)
    if code is not None:
        yield from _ForwardReader(module, code).chains()


def modules_taken_apart(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that this module's code does more with than call: their children may be used directly."""
    kind: Any = type(module)
    words = words_on_unknown_objects(kind)
    for path in paths_not_only_called(kind):
        used = follow_path(module, path)
        if isinstance(used, nn.Module):
            if path:
                yield used
            for inner in used.modules():  # whose children code with these words may access
                indexed = "[" in words and isinstance(inner, nn.Sequential)
                if inner is not module and (indexed or not words.isdisjoint(inner._modules)):
                    yield inner


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks or a replaced forward can see the module's inputs or outputs."""
    return any(getattr(module, kind) for kind in HOOKS) or "forward" in vars(module)


def _keeps_zero(module: Any) -> bool:
    keeps = type(module) in POINTWISE
    if type(module) is nn.Hardtanh:
        keeps = module.min_val <= 0 <= module.max_val
    elif type(module) is nn.Dropout:  # with p > 0, more values would change the random numbers drawn
        keeps = module.p == 0
    elif isinstance(module, nn.Module) and not keeps:
        keeps = _wraps_zero_preserving_function(module)
    return keeps and not has_hooks(module)


def _wraps_zero_preserving_function(module: nn.Module) -> bool:
    """Whether its forward is just ``return F.silu(input)``, or calls such a function held in an attribute."""
    kind: Any = type(module)
    code = read_forward(kind)
    if code is None or len(code.tree.body) != 1 or len(code.tree.args.args) != 2:
        return False
    call = getattr(code.tree.body[0], "value", None)
    if not isinstance(code.tree.body[0], ast.Return) or not isinstance(call, ast.Call) or not _has_one_argument(call):
        return False
    argument, called = call.args[0], call.func
    function = _resolved(called, code.names)
    if isinstance(called, ast.Attribute) and is_self_attribute(called, code.receiver):
        function = vars(module).get(called.attr)
    keeps = getattr(function, "func", function) in FUNCTIONS  # for a functools.partial, the function it wraps
    return keeps and isinstance(argument, ast.Name) and argument.id == code.tree.args.args[1].arg


def _is_source(module: Any) -> bool:
    return type(module) in (nn.Linear, nn.Embedding) and not has_hooks(module)


def _is_sink(module: Any) -> bool:
    return type(module) is nn.Linear and not has_hooks(module)


class _ForwardReader:
    """Reads one forward, for one module of its class."""

    def __init__(self, module: nn.Module, code: ForwardSource) -> None:
        self._module, self._code = module, code
        self._parents = {child: node for node in ast.walk(code.tree) for child in ast.iter_child_nodes(node)}

    def chains(self) -> Iterator[Chain]:
        for node in ast.walk(self._code.tree):
            if isinstance(node, ast.Call) and _has_one_argument(node) and _is_sink(self._child(node.func, once=True)):
                sources = self._sources(node.args[0])
                if sources:
                    yield Chain(tuple(sources), self._child(node.func))

    def _child(self, node: ast.expr, *, once: bool = False) -> Any:
        """Return the module that ``self.name`` is; with ``once``, only if the class's code mentions it once."""
        if not isinstance(node, ast.Attribute) or not is_self_attribute(node, self._code.receiver):
            return None
        return None if once and self._code.named[node.attr] != 1 else self._module._modules.get(node.attr)

    def _sources(self, node: ast.expr) -> list[nn.Module]:
        """Return the layers whose outputs this value combines, zero where they are; empty for any other value."""
        if isinstance(node, ast.Call):
            layer = self._child(node.func, once=True)
            if _is_source(layer):
                return [layer]
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and not node.args:
                return self._sources(node.func.value)
            keeps = _keeps_zero(self._child(node.func)) or _resolved(node.func, self._code.names) in FUNCTIONS
            return self._sources(node.args[0]) if keeps and node.args else []
        if isinstance(node, ast.BinOp):
            left, right = self._sources(node.left), self._sources(node.right)
            if isinstance(node.op, ast.Mult) and (_is_number(node.left) or _is_number(node.right)):
                return left or right
            both = isinstance(node.op, ast.Mult | ast.Add | ast.Sub) and left and right
            return [*left, *right] if both else []
        value = self._only_value(node) if isinstance(node, ast.Name) else None
        return [] if value is None else self._sources(value)

    def _only_value(self, name: ast.Name) -> ast.expr | None:
        """Return the value assigned to a variable, if the assignment directly precedes and this is the only read."""
        here, block = self._statement(name)
        if block is None:
            return None
        before = next((each for each in reversed(block[: block.index(here)]) if _mentions(each, name.id)), None)
        if before is None or not _assigns(before, name.id):
            return None
        reassigned = _assigns(here, name.id)
        if _mentions(here, name.id) != 1 + reassigned:
            return None
        end = here.end_lineno or here.lineno, here.end_col_offset or 0
        later = (node for node in ast.walk(self._code.tree) if isinstance(node, ast.Name) and node.id == name.id)
        read_later = not reassigned and any((node.lineno, node.col_offset) >= end for node in later)
        return None if read_later else before.value  # type: ignore[attr-defined]

    def _statement(self, node: ast.AST) -> tuple[ast.stmt, list[ast.stmt] | None]:
        """Return the statement of a node and the block it is in; no block if the code is not straight-line."""
        inside = [node]
        while not isinstance(inside[-1], ast.stmt):
            inside.append(self._parents[inside[-1]])
        statement = inside[-1]
        enclosing: list[ast.AST] = [statement]
        while enclosing[-1] is not self._code.tree:
            enclosing.append(self._parents[enclosing[-1]])
        crooked = any(isinstance(each, OTHER_SCOPES) for each in inside)
        crooked |= any(isinstance(each, NOT_STRAIGHT_LINE) for each in enclosing[:-1])
        if crooked or not isinstance(statement, ast.Assign | ast.Return | ast.Expr):
            return statement, None
        blocks = (value for _, value in ast.iter_fields(enclosing[1]) if isinstance(value, list))
        return statement, next(block for block in blocks if statement in block)


def _resolved(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the function that ``F.gelu`` refers to in a file."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    found = names.get(node.id) if isinstance(node, ast.Name) else None
    for part in reversed(parts):
        found = getattr(found, part, None)
    return found if inspect.isroutine(found) else None


def _has_one_argument(node: ast.Call) -> bool:
    return len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _mentions(node: ast.AST, name: str) -> int:
    return sum(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _assigns(node: ast.stmt, name: str) -> bool:
    """Whether the statement is just ``name = …``."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    target = node.targets[0]
    return isinstance(target, ast.Name) and target.id == name
