"""Find weights that a model's code reads directly, instead of calling the layers that hold them.

Padding changes what such code sees, so these layers must not be padded. The read is certain if the code names the path
(``self.wte.weight``), and possible if it reads the weight of something else (``layer.weight`` in a loop), reads all
parameters at once, or cannot be parsed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from ampwise.tune.align.module_source import MethodSource, attribute_path, read_methods

__all__ = ["WeightReader", "find_weight_readers", "follow_path"]

LAYER_NAMES = {"weight", "bias"}
ALL_NAMES = {"parameters", "named_parameters", "state_dict", "_parameters", "get_parameter", "vars", "__dict__"}
UNKNOWN = object()  # result for a path that cannot be followed


class WeightReader(NamedTuple):
    """A module whose code reads a layer's weight; ``doubt`` says why that is only possible, and is empty if certain."""

    module: nn.Module
    doubt: str = ""


class _Read(NamedTuple):
    path: tuple[str, ...] | None  # from the module; None: of something else
    reads_all: bool  # whether it reads all parameters below the path
    method: str
    counts: bool  # even if nothing in the model calls the method


def find_weight_readers(modules: Iterable[nn.Module]) -> dict[int, WeightReader]:
    """Return the readers of weights, by the id of the layer; certain reads take precedence."""
    found: dict[int, WeightReader] = {}
    known = list(modules)
    reached = _reached({type(module) for module in known})
    for module in known:
        for layer, doubt in _weight_reads(module, reached):
            if not doubt or id(layer) not in found:
                found[id(layer)] = WeightReader(module, doubt)
    return found


def follow_path(module: nn.Module, path: Iterable[str]) -> Any:
    """Follow a path of attributes from a module, registered or not; UNKNOWN if it cannot be followed."""
    found: Any = module
    for part in path:
        if not isinstance(found, nn.Module):
            return None  # not a module: a configuration
        has = {**vars(found), **found._buffers, **found._parameters, **found._modules}
        found = has.get(part, UNKNOWN)
        if found is UNKNOWN:
            return UNKNOWN
    return found


def _weight_reads(module: nn.Module, reached: frozenset[str]) -> Iterator[tuple[nn.Module, str]]:
    kind: Any = type(module)
    if read_methods(kind) is None:
        yield from ((layer, "cannot be parsed, and may read") for layer in _layers_in(module))
        return
    for read in _reads(kind):
        found = UNKNOWN if read.path is None else follow_path(module, read.path)
        if found is UNKNOWN and (read.counts or read.method in reached):
            yield from (
                (layer, "reads weights of layers it does not name, and may read") for layer in _layers_in(module)
            )
        elif isinstance(found, nn.Module) and read.reads_all and read.method in reached:
            yield from ((layer, "reads all parameters at once, and may read") for layer in _layers_in(found))
        elif isinstance(found, nn.Module) and found is not module and not read.reads_all:
            yield found, ""


def _layers_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules inside a module, registered or held in attributes."""
    kept = [value for value in vars(module).values() if isinstance(value, nn.Module)]
    for value in vars(module).values():
        values = value.values() if type(value) is dict else value if isinstance(value, list | tuple) else ()
        kept += [each for each in values if isinstance(each, nn.Module)]
    yield from (inner for each in (module, *kept) for inner in each.modules())


@lru_cache(maxsize=1024)
def _reads(kind: Any) -> tuple[_Read, ...]:
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    own = set(kind.__mro__[: kind.__mro__.index(owner) + 1]) - {nn.Module}
    return tuple(read for method in read_methods(kind) or () for read in _reads_in(method, method.owner in own))


def _reads_in(method: MethodSource, own: bool) -> Iterator[_Read]:
    for node in method.nodes:
        read = _parameter_read(node)
        if read is None:
            continue
        word, of = read
        path = None if of is None else attribute_path(_plain(of), method.receiver)
        reads_all = word not in LAYER_NAMES
        if not method.of_torch or (path is not None and not reads_all):
            yield _Read(path, reads_all, method.tree.name, own and not reads_all)


def _parameter_read(node: ast.AST) -> tuple[str, ast.expr | None] | None:
    """Return the word by which a node reads parameters, and the node it reads them of."""
    if isinstance(node, ast.Attribute) and node.attr in LAYER_NAMES | ALL_NAMES:
        return node.attr, node.value
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return None
    if node.func.id == "vars":
        return "vars", node.args[0]
    if node.func.id != "getattr" or len(node.args) < 2:
        return None
    name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
    if name is None or name in LAYER_NAMES | ALL_NAMES:
        return name or "vars", node.args[0]
    return None


def _plain(node: ast.expr) -> ast.expr:
    """Convert ``getattr(self, "wte")`` to ``self.wte``."""
    is_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
    if isinstance(node, ast.Call) and is_getattr and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
        return ast.Attribute(_plain(node.args[0]), str(node.args[1].value))
    return node


def _reached(kinds: Iterable[Any]) -> frozenset[str]:
    """Return the names of methods that a forward pass may call, by the names in the model's code."""
    methods = [method for kind in kinds for method in read_methods(kind) or ()]
    named: dict[str, set[str]] = {}
    for method in methods:
        words = {node.attr for node in method.nodes if isinstance(node, ast.Attribute)}
        named.setdefault(method.tree.name, set()).update(words)
    reached, new = set(), {name for name in named if name == "forward" or name.startswith("__")}
    while new:
        reached |= new
        new = {word for name in new for word in named[name] if word in named} - reached
    return frozenset(reached)
