"""Lines of a script that make or fill parameters, or assign a learning rate."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import lru_cache

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner, own_files
from ampwise.trace.names_in_code import call_name, nodes_of

__all__ = ["assigned_at", "assignment_of_rate", "converted_at", "zeroed_at"]

ZEROS = ("zeros", "zeros_like", "zeros_", "zero_", "new_zeros")
WITH_A_VALUE = ("constant_", "fill_", "full")


def converted_at(kind: type, attribute: str) -> CallSite | None:
    """Return the line that assigns to an attribute what is made of a new parameter: ``nn.Parameter(x).float()``."""
    return next((site for each in _sources(kind) if (site := _converted_in(*each, attribute)) is not None), None)


def assigned_at(kind: type, attribute: str) -> CallSite | None:
    """Return the only line of a class that assigns to an attribute of the object."""
    for file, name in _sources(kind):
        lines = [
            node.lineno
            for node in _nodes_of(file, name)
            if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store)
        ]
        if lines:
            return CallSite(file=file, line=lines[0]) if len(lines) == 1 else None
    return None


def zeroed_at(kind: type, attribute: str) -> CallSite | None:
    """Return the last line of a class that fills a parameter, or one of a part of it, with zeros."""
    return next((site for each in _sources(kind) if (site := _zeroed_in(*each, attribute)) is not None), None)


def assignment_of_rate(name: str) -> CallSite | None:
    """Return the only line that assigns ``x.lr``, or ``x.defaults["lr"]``; None if there are several."""
    found = []
    for file in own_files(name):
        for node in nodes_of(file):
            if not isinstance(getattr(node, "ctx", None), ast.Store):
                continue
            is_lr = isinstance(node, ast.Attribute) and node.attr == name == "lr" and call_name(node.value) != "self"
            is_default = isinstance(node, ast.Subscript) and call_name(node.value) == name == "defaults"
            if is_lr or is_default:
                found.append(CallSite(file=file, line=node.lineno))  # type: ignore[attr-defined]
    return found[0] if len(found) == 1 else None


def _sources(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the file and the name of a class and of its bases, as far as they are the script's own."""
    for cls in kind.__mro__:
        try:
            file = inspect.getsourcefile(cls)
        except TypeError:
            continue
        if file is not None and code_owner(file) == "own":
            yield file, cls.__name__


@lru_cache(maxsize=256)
def _converted_in(file: str, name: str, attribute: str) -> CallSite | None:
    for node in _nodes_of(file, name):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        calls = [each for each in ast.walk(node.value) if isinstance(each, ast.Call)]
        is_made = any(call_name(each) == "Parameter" for each in calls) and call_name(node.value) != "Parameter"
        if is_made and any(isinstance(each, ast.Attribute) and each.attr == attribute for each in targets):
            return CallSite(file=file, line=node.lineno)
    return None


@lru_cache(maxsize=256)
def _zeroed_in(file: str, name: str, attribute: str) -> CallSite | None:
    lines = [
        node.lineno
        for node in _nodes_of(file, name)
        if isinstance(node, ast.Assign | ast.Expr)
        and any(isinstance(each, ast.Call) and _makes_zeros(each) for each in ast.walk(node.value))
        and any(isinstance(each, ast.Attribute) and each.attr == attribute for each in ast.walk(node))
    ]
    return CallSite(file=file, line=max(lines)) if lines else None


def _makes_zeros(call: ast.Call) -> bool:
    name = call_name(call)
    if name in ZEROS:
        return True
    return name in WITH_A_VALUE and any(isinstance(each, ast.Constant) and each.value == 0 for each in call.args)


def _nodes_of(file: str, name: str) -> Iterator[ast.AST]:
    """Yield the parts of the classes of a name in a file."""
    for node in nodes_of(file):
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from ast.walk(node)
