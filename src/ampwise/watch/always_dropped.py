"""Functional dropout that evaluation mode does not switch off, found in the code of a model that draws random "
"numbers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner

__all__ = ["functional_dropout", "random_position"]

NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
WITH_TRAINING = 3  # positional arguments


def random_position() -> tuple[Any, ...]:
    """Return what changes when random numbers are drawn, without a sync."""
    state = torch.default_generator.get_state()
    offsets: list[int] = []
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        offsets = [each.get_offset() for each in torch.cuda.default_generators]
    return (state.numpy().tobytes(), *offsets)


def functional_dropout(model: nn.Module) -> Iterator[tuple[CallSite, str]]:
    """Yield the calls of functional dropout without ``training`` in the model's own classes, and the class of each."""
    for kind in {type(module): None for module in model.modules()}:
        file = inspect.getsourcefile(kind) if kind.__module__ != "builtins" else None
        if file is None or code_owner(file) != "own":
            continue
        try:
            lines, first = inspect.getsourcelines(kind)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError, TypeError):
            continue
        names = vars(inspect.getmodule(kind)) if inspect.getmodule(kind) is not None else {}
        for call in _unguarded_calls(tree):
            given = {keyword.arg for keyword in call.keywords}
            is_off = call.args[1:2] and isinstance(call.args[1], ast.Constant) and call.args[1].value == 0
            if len(call.args) >= WITH_TRAINING or given & {"training", None} or is_off:
                continue
            if _is_functional_dropout(call.func, names):
                yield CallSite(file=file, line=first + call.lineno - 1, function=kind.__name__), kind.__name__


def _unguarded_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that are in no branch of an ``if`` on ``training``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.IfExp) and "training" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Call):
            yield node
        yield from _unguarded_calls(node)


def _is_functional_dropout(func: ast.expr, names: dict[str, Any]) -> bool:
    text = ast.unparse(func)
    if not text.endswith(NAMES):
        return False
    found: Any = names
    for part in text.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    return any(found is getattr(functional, name) for name in NAMES)
