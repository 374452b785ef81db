"""Where GradScalers are made, and whether a file puts one to use."""

from __future__ import annotations

import ast
import functools

from ampwise.source.calls import ANYTHING
from ampwise.source.events import Context
from ampwise.source.frame import Frame
from ampwise.source.precision import keyword, switch_of
from ampwise.source.project import Code
from ampwise.source.vocabulary import GRAD_SCALERS
from ampwise.source.walk import Trace

__all__ = ["MadeScaler", "scalers_held", "scalers_made", "works_with_scaler"]


class MadeScaler:
    """One ``GradScaler(...)`` in the source, with every context it is made in."""

    __slots__ = ("contexts", "enabled", "node")

    def __init__(self, node: ast.Call, enabled: ast.expr | None) -> None:
        self.node = node
        self.enabled = enabled
        self.contexts: list[tuple[Context, Trace]] = []

    @property
    def is_off(self) -> bool:
        return switch_of(self.enabled) is False


@functools.lru_cache(maxsize=2)  # several rules ask, of one file after the other
def scalers_made(code: Code) -> list[MadeScaler]:
    """The scalers made in this file, in source order; those that are switched off are left out."""
    found: dict[ast.Call, MadeScaler] = {}
    for trace in code.traces:
        for site in trace.calls:
            frame, node = site.context.frame, site.node
            if not isinstance(node, ast.Call) or frame.outline is not code.outline:
                continue
            if frame.qualified(node.func) in GRAD_SCALERS:
                made = found.setdefault(node, MadeScaler(node, keyword(node, "enabled")))
                made.contexts.append((site.context, trace))
    on = (made for made in found.values() if not made.is_off)
    return sorted(on, key=lambda made: (made.node.lineno, made.node.col_offset))


def scalers_held(node: ast.expr, frame: Frame) -> list[ast.Call]:
    """The constructor calls whose scaler ``node`` may hold."""
    return [
        value.node
        for value in frame.values(node)
        if isinstance(value.node, ast.Call) and value.frame.qualified(value.node.func) in GRAD_SCALERS
    ]


def works_with_scaler(code: Code) -> bool:
    """Whether a scaler is put to use here, or handed to a function that may do so."""
    kinds = {event.kind for event in code.events if event.key != ANYTHING}
    used = bool(kinds & {"scaled backward", "scaler step", "unscale"})
    return used or ("opaque" in kinds and bool(scalers_made(code)))
