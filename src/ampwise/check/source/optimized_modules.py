"""The modules whose parameters an optimizer gets, through names, groups and loops."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.casts import module_gone_through
from ampwise.check.source.dictionary_changes import changes_of
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text, last_name, method_called
from ampwise.check.source.precision import argument_of
from ampwise.check.source.tree_walk import walk

GROUPS = LazyPattern(r"param|group|^(filter|list|tuple|chain|iter|sorted|itertools)$")
COPIES = frozenset(("clone", "float", "to", "copy", "deepcopy", "detach"))
DISPLAYS = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.BinOp)
DEEPEST = 6  # names and calls between an optimizer and the module whose parameters it gets


def optimized(call: ast.Call, frame: Frame) -> Iterator[tuple[ast.expr, Frame, bool]]:
    """Yield the names in what an optimizer gets, and whether it gets all parameters of what they name."""
    if method_called(call) == "configure_optimizers" and isinstance(call.func, ast.Attribute):
        yield call.func.value, frame, True
    given = argument_of(call, "params", 0)
    pending = [(given, frame, 0)] if given is not None else []
    seen: set[ast.expr] = set()
    for expression, home, depth in pending:
        if expression in seen or depth > DEEPEST or _copies(expression):
            continue
        seen.add(expression)
        parts = walk(expression)
        taken = {part.value for part in parts if isinstance(part, ast.Attribute)}
        all_of = {part.value for part in parts if isinstance(part, ast.Attribute) and "parameters" in part.attr}
        for part in parts:
            if not isinstance(part, ast.Name | ast.Attribute):
                continue
            yield part, home, part in all_of or part not in taken
            for module in _looped_over(part, home):
                yield module, home, True
            for value, where in home.values(part):
                if value is not None and value is not part and _is_group(value):
                    pending.append((value, where, depth + 1))
                    pending += [(added, where, depth + 1) for added in _added(part, where)]


def _added(name: ast.expr, frame: Frame) -> list[ast.expr]:
    """Return what the function of a frame adds to a list: ``params += list(net.parameters())``, ``decay.append(p)``."""
    changes = changes_of(dotted_text(name) or "", frame.function.node, frame.outline)
    return [value for kind, _, value in changes if kind in ("item", "merge")]


def _looped_over(node: ast.expr, frame: Frame) -> list[ast.expr]:
    """Return the module whose parameters, or the modules that, a loop around a name goes through under this name."""
    outer: ast.AST | None = frame.outline.script.parents.get(node) if isinstance(node, ast.Name) else None
    while isinstance(outer, ast.expr | ast.keyword | ast.stmt) and outer is not frame.function.node:
        if isinstance(outer, ast.For) and node not in walk(outer.iter):
            names = [part.id for part in walk(outer.target) if isinstance(part, ast.Name)]
            gone_through = module_gone_through(outer)
            if isinstance(node, ast.Name) and node.id in names[-1:]:
                if gone_through is not None:
                    return [gone_through[1]]
                return outer.iter.elts if isinstance(outer.iter, ast.List | ast.Tuple) else []
        outer = frame.outline.script.parents.get(outer)
    return []


def _copies(node: ast.expr) -> bool:
    """Whether an expression holds copies: ``[p.detach().clone().float() for p in model.parameters()]``, or is one."""
    each = node.elt if isinstance(node, ast.ListComp | ast.GeneratorExp) else None
    is_copy = method_called(node) in COPIES and not any(method_called(part) == "parameters" for part in walk(node))
    return is_copy or (each is not None and any(method_called(part) in COPIES for part in walk(each)))


def _is_group(node: ast.expr) -> bool:
    """Whether an expression holds parameters, or groups of them, not a module."""
    return isinstance(node, DISPLAYS) or (isinstance(node, ast.Call) and bool(GROUPS.search(last_name(node.func))))
