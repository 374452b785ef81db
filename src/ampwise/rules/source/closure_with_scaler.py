"""A closure passed to ``scaler.step``, or an optimizer that needs one."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.events import SourceEvent
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.scalers import scalers_in
from ampwise.check.source.steps import Region
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP113",
    name="closure-with-scaler",
    severity=Severity.ERROR,
    summary="A GradScaler is used with an optimizer's closure.",
    why=(
        "The optimizer calls the closure inside its step, after the scaler has unscaled: the closure's gradients are "
        "applied with the loss scale still on them, or unscaled ones are lost. `scaler.step(optimizer, closure=f)` "
        "raises RuntimeError; passed by position the closure runs, and plain SGD then moves the weights 65536 times "
        "too far. LBFGS, which needs a closure, does not work with a GradScaler."
    ),
    fix=(
        "Run the forward and the scaled backward before `scaler.step(optimizer)`, without a closure; with LBFGS, "
        "train in float32 or bfloat16 without a GradScaler."
    ),
    bad="scaler.step(optimizer, closure)\nscaler.update()",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
)
NEEDS = (("caler",), (".step(",), ("closure", "LBFGS"))

NEEDS_A_CLOSURE = ("torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS")


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        for event in region.events:
            call = event.node
            if not isinstance(call, ast.Call):
                continue
            if event.kind == "scaler step" and _given_closure(call, call.args[1:], event) and _is_known_scaler(event):
                yield RULE.at(event.place, "GradScaler.step does not support closures")
            elif event.kind == "scaler step" and _is_lbfgs(call, event):
                yield RULE.at(event.place, "LBFGS needs a closure, which GradScaler.step does not support")
            elif event.kind == "optimizer step" and _scaled_in_closure(call, event, region):
                yield RULE.at(
                    event.place, "the closure's gradients are applied while still multiplied by the loss scale"
                )


def _given_closure(call: ast.Call, further: list[ast.expr], event: SourceEvent) -> ast.expr | None:
    named = argument_of(call, "closure")
    candidates = further[:1] if named is None else [named]
    return next((argument for argument in candidates if _is_closure(argument, event)), None)


def _is_closure(argument: ast.expr, event: SourceEvent) -> bool:
    """Return whether the argument is a function; a wrapper that passes on its ``closure=None`` does not count."""
    if isinstance(argument, ast.Lambda):
        return True
    if not isinstance(argument, ast.Name | ast.Attribute):
        return False
    if isinstance(event.frame.definition(argument), FunctionOutline):
        return True
    made = [value.node for value in event.frame.values(argument)]
    return "closure" in (dotted_text(argument) or "").lower() and any(
        isinstance(node, ast.Call | ast.Lambda) for node in made
    )


def _is_known_scaler(event: SourceEvent) -> bool:
    """Return whether the scaler is created here; one from another file may be of a class that supports closures."""
    return isinstance(event.receiver, ast.Name) or bool(scalers_in(event.receiver, event.frame))


def _is_lbfgs(call: ast.Call, event: SourceEvent) -> bool:
    if not call.args:
        return False
    values = event.frame.values(call.args[0])
    return bool(values) and all(
        isinstance(value.node, ast.Call) and value.frame.qualified(value.node.func) in NEEDS_A_CLOSURE
        for value in values
    )


@functools.lru_cache(maxsize=2)
def _kinds_by_function(region: Region) -> dict[FunctionOutline, set[str]]:
    """Return the kinds of events that happen in each function, or in functions it calls."""
    found: dict[FunctionOutline, set[str]] = {}
    for event in region.events:
        for frame in event.frame.callers():
            found.setdefault(frame.function, set()).add(event.kind)
    return found


def _scaled_in_closure(call: ast.Call, event: SourceEvent, region: Region) -> bool:
    """Return whether the closure of ``optimizer.step(closure)`` scales the loss and leaves the gradients scaled."""
    closure = _given_closure(call, call.args, event)
    target = event.frame.definition(closure) if isinstance(closure, ast.Name) else None
    if not isinstance(target, FunctionOutline):
        return False
    inside = _kinds_by_function(region).get(target, set())
    return "scaled backward" in inside and not inside & {"unscale", "opaque", "scaler step"}
