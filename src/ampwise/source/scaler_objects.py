"""Where GradScalers are made, and whether they do anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.source.events import Event
from ampwise.source.frame import Frame
from ampwise.source.precision import keyword, switch_of
from ampwise.source.project import Code
from ampwise.source.vocabulary import GRAD_SCALERS
from ampwise.source.walk import Site

__all__ = ["is_switched_off", "scaler_constructors", "scaler_is_off", "scalers_made_for"]


def scaler_constructors(code: Code) -> Iterator[Site]:
    """The calls of this file that make a GradScaler of torch's own, each once for each context."""
    for site in code.calls:
        if isinstance(site.node, ast.Call) and site.context.frame.qualified(site.node.func) in GRAD_SCALERS:
            yield site


def scalers_made_for(node: ast.expr, frame: Frame) -> list[ast.Call]:
    """The constructor calls that ``node`` may hold the result of."""
    return [
        value.node
        for value in frame.values(node)
        if isinstance(value.node, ast.Call) and value.frame.qualified(value.node.func) in GRAD_SCALERS
    ]


def is_switched_off(call: ast.Call, frame: Frame) -> bool:
    """Whether a scaler or an autocast context is made with ``enabled=False``."""
    return switch_of(keyword(call, "enabled"), frame) is False


def scaler_is_off(event: Event) -> bool:
    """Whether the scaler of ``scaler.step(optimizer)`` is one that never scales."""
    if not isinstance(event.node, ast.Call) or not isinstance(event.node.func, ast.Attribute):
        return False
    made = scalers_made_for(event.node.func.value, event.frame)
    return bool(made) and all(is_switched_off(call, event.frame) for call in made)
