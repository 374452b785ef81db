"""Find the constructor of an object behind ``.to(device)``, ``DataParallel(...)`` or a loop over layers."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.names import dotted_text, last_name
from ampwise.check.source.outline import FunctionOutline

if TYPE_CHECKING:
    from ampwise.check.source.frame import Frame

MOVES = frozenset(("to", "cuda", "cpu", "eval", "train", "float", "half", "requires_grad_"))
WRAPPERS = frozenset(
    ("DataParallel", "DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "compile")
) | {"convert_sync_batchnorm"}
LISTS = frozenset(("ModuleList", "Sequential"))
MOST = 16


def find_constructors(node: ast.expr, frame: Frame) -> list[tuple[ast.expr | None, Frame]]:
    """Return the expressions that may have made the object ``node``, with their frames; None for an unknown one."""
    found: list[tuple[ast.expr | None, Frame]] = []
    pending: list[tuple[ast.expr, Frame]] = [(node, frame)]
    seen = {id(node)}
    for part, where in pending:
        held: list[tuple[ast.expr | None, Frame]] = [(part, where)]
        is_name = isinstance(part, ast.Name | ast.Attribute)
        if is_name:
            bindings = where.function.bindings.get(part.id, []) if isinstance(part, ast.Name) else []
            loop = bindings[0].node if len(bindings) == 1 else None
            held = _elements(loop.iter, where) if isinstance(loop, ast.For) else []
            held = held or [*where.values(part)]
        elif isinstance(part, ast.Subscript):
            held = _entries(part, where) or held
        for value, home in held:
            inner = None  # what a call moves or wraps
            if isinstance(value, ast.Call):
                if isinstance(value.func, ast.Attribute) and value.func.attr in MOVES:
                    inner = value.func.value
                elif value.args and last_name(value.func) in WRAPPERS:
                    inner = value.args[0]
            returned = _returned(value, home) if inner is None and isinstance(value, ast.Call) else []
            if returned and len(pending) < MOST:
                pending += returned
            elif inner is None:
                found.append((None if is_name and value is part else value, home))
            elif id(inner) not in seen and len(seen) < MOST:
                seen.add(id(inner))
                name = dotted_text(inner)
                if name is None or name != dotted_text(node):  # model = model.to(device): its other values are listed
                    pending.append((inner, home))
    return found


def _returned(call: ast.Call, frame: Frame) -> list[tuple[ast.expr, Frame]]:
    """Return what a function of the script, such as ``build_model(cfg)``, returns, whoever calls it."""
    function = frame.definition(call.func)
    if not isinstance(function, FunctionOutline):
        return []
    inside = frame.lookup.frame(function)  # one frame for all calls: a new one for each would have no end
    return [(value, inside) for value in function.returns if value is not None]


def _entries(item: ast.Subscript, frame: Frame) -> list[tuple[ast.expr | None, Frame]]:
    """Return what ``losses["mask"]`` may be, after ``losses = {"mask": nn.BCELoss()}``."""
    key = item.slice.value if isinstance(item.slice, ast.Constant) else None
    found: list[tuple[ast.expr | None, Frame]] = []
    for value, home in frame.values(item.value) if isinstance(item.value, ast.Name | ast.Attribute) else ():
        if isinstance(value, ast.Dict):
            keys = [part.value if isinstance(part, ast.Constant) else None for part in value.keys]
            found += [(held, home) for name, held in zip(keys, value.values, strict=True) if key in (name, None)]
        elif isinstance(value, ast.List | ast.Tuple):
            chosen = value.elts[key : key + 1] if isinstance(key, int) and key >= 0 else value.elts
            found += [(held, home) for held in chosen]
        else:
            return []
    return found


def _elements(iterated: ast.expr, frame: Frame) -> list[tuple[ast.expr | None, Frame]]:
    """Return the layers that ``block`` may be in ``for block in self.blocks``."""
    if isinstance(iterated, ast.Call) and dotted_text(iterated.func) in ("enumerate", "reversed") and iterated.args:
        iterated = iterated.args[0]
    found: list[tuple[ast.expr | None, Frame]] = []
    for value in frame.values(iterated) if isinstance(iterated, ast.Name | ast.Attribute) else ():
        made = value.node
        if isinstance(made, ast.Call) and last_name(made.func) in LISTS and made.args:
            first = made.args[0].value if isinstance(made.args[0], ast.Starred) else made.args[0]
            if isinstance(first, ast.ListComp | ast.GeneratorExp):
                layers = [first.elt]
            else:
                layers = first.elts if isinstance(first, ast.List | ast.Tuple) else made.args
            found += [(layer, value.frame) for layer in layers]
    return found
