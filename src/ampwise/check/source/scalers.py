"""Where a file makes GradScalers, and whether it uses one."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, field

from ampwise.check.source.call_events import ANYTHING
from ampwise.check.source.events import EventContext
from ampwise.check.source.frame import Frame
from ampwise.check.source.precision import argument_of, constant_bool
from ampwise.check.source.project import SourceFile
from ampwise.check.source.torch_names import GRAD_SCALERS
from ampwise.check.source.walk import CodeTrace


@dataclass(slots=True, eq=False)
class ScalerCall:
    """One ``GradScaler(...)`` call in the source, with every context that runs it."""

    node: ast.Call
    enabled: ast.expr | None
    contexts: list[tuple[EventContext, CodeTrace]] = field(default_factory=list)


@functools.lru_cache(maxsize=2)  # several rules use it for each file
def scalers_made(code: SourceFile) -> list[ScalerCall]:
    """Return the scalers made in this file, in source order, without disabled ones."""
    own = [made for made in scalers_followed(code) if made.contexts[0][0].frame.outline is code.outline]
    return sorted(own, key=lambda made: (made.node.lineno, made.node.col_offset))


@functools.lru_cache(maxsize=2)
def scalers_followed(code: SourceFile) -> list[ScalerCall]:
    """Return the scalers made in this file and in functions of others that it calls, without disabled ones."""
    found: dict[ast.Call, ScalerCall] = {}
    for trace in code.traces:
        for site in trace.calls:
            frame, node = site.context.frame, site.node
            if isinstance(node, ast.Call) and frame.qualified(node.func) in GRAD_SCALERS:
                made = found.setdefault(node, ScalerCall(node, argument_of(node, "enabled")))
                made.contexts.append((site.context, trace))
    return [made for made in found.values() if any(_may_be_on(made, context.frame) for context, _ in made.contexts)]


def _may_be_on(made: ScalerCall, frame: Frame) -> bool:
    return made.enabled is None or constant_bool(made.enabled, frame) is not False


def scalers_in(node: ast.expr, frame: Frame) -> list[ast.Call]:
    """Return the constructor calls whose scaler ``node`` may hold."""
    calls = [(value, home) for value, home in frame.values(node) if isinstance(value, ast.Call)]
    return [call for call, home in calls if home.qualified(call.func) in GRAD_SCALERS]


def uses_scaler(code: SourceFile) -> bool:
    """Whether the file uses a scaler, or passes one to a function that may."""
    kinds = {event.kind for event in code.events if event.key != ANYTHING}
    used = bool(kinds & {"scaled backward", "scaler step", "unscale"})
    return used or ("opaque" in kinds and bool(scalers_made(code)))
