"""Lines of a script that take a tensor out of the graph: in front of a loss, or after a module."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner, own_files, says
from ampwise.trace.names_in_code import bound_names, call_name, free_names, functions_of
from ampwise.watch.cut_terms import MOST_NAMES, Scope, scope_of, value_of
from ampwise.watch.graph_lines import nodes_before

__all__ = ["cut_after", "cut_before_loss"]

METHODS = ("detach", "detach_", "item", "numpy", "tolist")
COPIES = ("tensor", "as_tensor", "from_numpy", "Tensor", "FloatTensor")


def cut_before_loss(frame: FrameType | None, trains: Callable[[Tensor], bool]) -> CallSite | None:
    """Return the line that detaches a value from the parameters in the loss that is differentiated now.

    trains: whether a leaf is one of these parameters. None if there is no such line, or several.
    """
    while frame is not None and code_owner(frame.f_code.co_filename) != "own":
        frame = frame.f_back
    scope = None if frame is None else scope_of(frame.f_code, frame.f_lasti)
    if frame is None or scope is None:
        return None
    values = {**frame.f_globals, **frame.f_locals}
    lines = {
        cut.lineno
        for cut, given in _cuts_of(scope)
        if isinstance(value := value_of(given, values), Tensor) and leads_to(value.grad_fn, trains)
    }
    code = frame.f_code
    return CallSite(file=code.co_filename, line=lines.pop(), function=code.co_name) if len(lines) == 1 else None


def _cuts_of(scope: Scope) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what takes values out of the graph in a loss, and the values, also where its names are assigned."""
    pending, seen = [scope.loss], set[str]()
    while pending:
        term = pending.pop()
        yield from _cuts_in(term)
        for name in sorted(free_names(term) - seen):
            if len(seen) < MOST_NAMES:
                seen.add(name)
                pending += [each.value for each in scope.of(name) if not each.quiet]


def _cuts_in(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and each.attr == "data" and isinstance(each.ctx, ast.Load):
            yield each, each.value
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            if each.func.attr in METHODS and not each.args:
                yield each, each.func.value
            elif each.func.attr in COPIES and each.args:
                yield each, each.args[0]


def leads_to(node: Any, trains: Callable[[Tensor], bool]) -> bool:
    """Return whether a graph reaches a leaf of which ``trains`` holds."""
    leaves = (getattr(each, "variable", None) for each in nodes_before(node))
    return any(leaf is not None and trains(leaf) for leaf in leaves)


def cut_after(module: str) -> CallSite | None:
    """Return the only line that takes the output of a module, such as ``net.encoder``, out of the graph.

    It is looked for in the functions that call the module by its name or by that of one that contains it.
    """
    names = {part for part in module.split(".") if not part.isdigit()}
    found = {
        CallSite(file=file, line=line, function=function.name)
        for file in own_files()
        if any(says(file, name) for name in names)
        for function in functions_of(file)
        for line in _lines_after(function, names)
    }
    return found.pop() if len(found) == 1 else None


def _lines_after(function: Any, modules: set[str]) -> Iterator[int]:
    """Yield the lines of a function that cut what a call of one of the modules has returned."""
    outputs: set[str] = set()
    statements = [each for part in function.body for each in ast.walk(part) if isinstance(each, ast.stmt)]
    for each in sorted(statements, key=lambda each: each.lineno):
        value = each.value if isinstance(each, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr) else None
        if value is None:
            continue
        for cut, given in _cuts_in(value):
            if _calls(given, modules) or (free_names(given) & outputs and call_name(cut) != "item"):
                yield cut.lineno
                break
        if isinstance(each, ast.Assign) and (_calls(value, modules) or free_names(value) & outputs):
            outputs |= bound_names(each)


def _calls(node: ast.AST, modules: set[str]) -> bool:
    return any(isinstance(each, ast.Call) and call_name(each) in modules for each in ast.walk(node))
