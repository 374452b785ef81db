"""Find the constructor of an object behind ``.to(device)``, ``DataParallel(...)`` or a loop over layers."""

from __future__ import annotations

import ast

from ampwise.check.source.names import dotted_text

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from ampwise.check.source.frame import Frame

__all__ = ["find_constructors"]

MOVES = frozenset(("to", "cuda", "cpu", "eval", "train", "float", "half", "requires_grad_"))
WRAPPERS = frozenset(("DataParallel", "DistributedDataParallel", "DDP", "compile", "convert_sync_batchnorm"))
LISTS = frozenset(("ModuleList", "Sequential"))
MOST = 16


def find_constructors(node: ast.expr, frame: Frame) -> list[tuple[ast.expr | None, Frame]]:
    """Return the expressions that may have made the object ``node``, with their frames; None for an unknown one."""
    found: list[tuple[ast.expr | None, Frame]] = []
    pending, seen = [(node, frame)], {id(node)}
    while pending:
        part, where = pending.pop(0)
        for value, home in _held(part, where):
            inner = _inside(value)
            if inner is None:
                found.append((value, home))
            elif id(inner) not in seen and len(seen) < MOST:
                seen.add(id(inner))
                if not _is_same_name(inner, node):  # model = model.to(device): its other assignments are also listed
                    pending.append((inner, home))
    return found


def _held(node: ast.expr, frame: Frame) -> list[tuple[ast.expr | None, Frame]]:
    if isinstance(node, ast.Name):
        elements = _elements_looped_over(node, frame)
        if elements:
            return elements
    if not isinstance(node, ast.Name | ast.Attribute):
        return [(node, frame)]
    return [(None if value.node is node else value.node, value.frame) for value in frame.values(node)]


def _is_same_name(node: ast.expr, other: ast.expr) -> bool:
    name = dotted_text(node)
    return name is not None and name == dotted_text(other)


def _inside(node: ast.expr | None) -> ast.expr | None:
    """Return what a call moves or wraps; None if it does neither."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
        return node.func.value
    name = (dotted_text(node.func) or "").rpartition(".")[2]
    return node.args[0] if name in WRAPPERS and node.args else None


def _elements_looped_over(name: ast.Name, frame: Frame) -> list[tuple[ast.expr | None, Frame]]:
    """Return the layers that ``block`` may be in ``for block in self.blocks``."""
    bindings = frame.function.bindings.get(name.id, [])
    if len(bindings) != 1 or not isinstance(bindings[0].node, ast.For):
        return []
    iterated = bindings[0].node.iter
    if isinstance(iterated, ast.Call) and dotted_text(iterated.func) in ("enumerate", "reversed") and iterated.args:
        iterated = iterated.args[0]
    values = frame.values(iterated) if isinstance(iterated, ast.Name | ast.Attribute) else []
    return [(element, value.frame) for value in values for element in _elements(value.node)]


def _elements(node: ast.expr | None) -> list[ast.expr]:
    if isinstance(node, ast.Call) and (dotted_text(node.func) or "").rpartition(".")[2] in LISTS and node.args:
        first = node.args[0].value if isinstance(node.args[0], ast.Starred) else node.args[0]
        if isinstance(first, ast.ListComp | ast.GeneratorExp):
            return [first.elt]
        return first.elts if isinstance(first, ast.List | ast.Tuple) else node.args
    return []
