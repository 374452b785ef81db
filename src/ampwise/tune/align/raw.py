"""Whose weights a model's code takes by itself, instead of calling the layers that have them.

Padding changes what such code sees, so a layer must be left whose weight is asked for: certainly, by its path
(``self.wte.weight``), or perhaps, where the code asks for the weight of something else (``layer.weight`` in a loop) or
for all parameters at once, or cannot be read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from ampwise.tune.align.reading import Method, methods_of, path_of

__all__ = ["Reader", "at", "readers"]

OF_A_LAYER = {"weight", "bias"}
OF_ALL = {"parameters", "named_parameters", "state_dict", "_parameters", "get_parameter", "vars", "__dict__"}
UNKNOWN = object()  # where a path leads that ends nowhere


class Reader(NamedTuple):
    """A module whose code takes a layer's weight, and why that is only likely; nothing where it is certain."""

    module: nn.Module
    doubt: str = ""


class _Read(NamedTuple):
    path: tuple[str, ...] | None  # from the module; None: of something else
    of_all: bool  # of whatever is in there
    method: str
    counts: bool  # even where nothing in the model names the method


def readers(modules: Iterable[nn.Module]) -> dict[int, Reader]:
    """Of the layers that code takes the weights of, by their id, who does; certainty comes first."""
    found: dict[int, Reader] = {}
    known = list(modules)
    reached = _reached({type(module) for module in known})
    for module in known:
        for layer, doubt in _taken(module, reached):
            if not doubt or id(layer) not in found:
                found[id(layer)] = Reader(module, doubt)
    return found


def at(module: nn.Module, path: Iterable[str]) -> Any:
    """What a path from a module leads to, be it registered or only kept; UNKNOWN where it cannot be followed."""
    found: Any = module
    for part in path:
        if not isinstance(found, nn.Module):
            return None  # something of no module's: a configuration
        has = {**vars(found), **found._buffers, **found._parameters, **found._modules}
        found = has.get(part, UNKNOWN)
        if found is UNKNOWN:
            return UNKNOWN
    return found


def _taken(module: nn.Module, reached: frozenset[str]) -> Iterator[tuple[nn.Module, str]]:
    kind: Any = type(module)
    if methods_of(kind) is None:
        yield from ((layer, "cannot be read, and may ask") for layer in _layers_in(module))
        return
    for read in _reads(kind):
        found = UNKNOWN if read.path is None else at(module, read.path)
        if found is UNKNOWN and (read.counts or read.method in reached):
            yield from (
                (layer, "asks for weights of things without their names, so perhaps it asks")
                for layer in _layers_in(module)
            )
        elif isinstance(found, nn.Module) and read.of_all and read.method in reached:
            yield from ((layer, "takes parameters all at once, so perhaps it asks") for layer in _layers_in(found))
        elif isinstance(found, nn.Module) and found is not module and not read.of_all:
            yield found, ""


def _layers_in(module: nn.Module) -> Iterator[nn.Module]:
    """Whatever a module has, and what it keeps without having registered it."""
    kept = [value for value in vars(module).values() if isinstance(value, nn.Module)]
    for value in vars(module).values():
        values = value.values() if type(value) is dict else value if isinstance(value, list | tuple) else ()
        kept += [each for each in values if isinstance(each, nn.Module)]
    yield from (inner for each in (module, *kept) for inner in each.modules())


@lru_cache(maxsize=1024)
def _reads(kind: Any) -> tuple[_Read, ...]:
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    own = set(kind.__mro__[: kind.__mro__.index(owner) + 1]) - {nn.Module}
    return tuple(read for method in methods_of(kind) or () for read in _reads_in(method, method.owner in own))


def _reads_in(method: Method, own: bool) -> Iterator[_Read]:
    for node in method.nodes:
        asked = _asked(node)
        if asked is None:
            continue
        word, of = asked
        path = None if of is None else path_of(_plain(of), method.receiver)
        of_all = word not in OF_A_LAYER
        if not method.of_torch or (path is not None and not of_all):
            yield _Read(path, of_all, method.tree.name, own and not of_all)


def _asked(node: ast.AST) -> tuple[str, ast.expr | None] | None:
    """The word by which a node asks for parameters, and of what."""
    if isinstance(node, ast.Attribute) and node.attr in OF_A_LAYER | OF_ALL:
        return node.attr, node.value
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return None
    if node.func.id == "vars":
        return "vars", node.args[0]
    if node.func.id != "getattr" or len(node.args) < 2:
        return None
    name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
    if name is None or name in OF_A_LAYER | OF_ALL:
        return name or "vars", node.args[0]
    return None


def _plain(node: ast.expr) -> ast.expr:
    """``self.wte`` of ``getattr(self, "wte")``."""
    is_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
    if isinstance(node, ast.Call) and is_getattr and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
        return ast.Attribute(_plain(node.args[0]), str(node.args[1].value))
    return node


def _reached(kinds: Iterable[Any]) -> frozenset[str]:
    """The names of methods that a forward pass may come to, by what the code of the model names."""
    methods = [method for kind in kinds for method in methods_of(kind) or ()]
    named: dict[str, set[str]] = {}
    for method in methods:
        words = {node.attr for node in method.nodes if isinstance(node, ast.Attribute)}
        named.setdefault(method.tree.name, set()).update(words)
    reached, new = set(), {name for name in named if name == "forward" or name.startswith("__")}
    while new:
        reached |= new
        new = {word for name in new for word in named[name] if word in named} - reached
    return frozenset(reached)
