"""A closure given to ``scaler.step``, or an optimizer that needs one."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Event
from ampwise.source.names import dotted_text
from ampwise.source.outline import Function
from ampwise.source.precision import keyword
from ampwise.source.project import Code
from ampwise.source.scalers import scalers_held
from ampwise.source.steps import Region

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP113",
    name="closure-with-scaler",
    severity=Severity.ERROR,
    summary="A GradScaler is used with an optimizer's closure.",
    why=(
        "The optimizer calls the closure inside its step, after the scaler has unscaled: the gradients the closure "
        "makes are applied with the loss scale still on them, or unscaled ones are lost. "
        "`scaler.step(optimizer, closure=f)` raises RuntimeError; given by position the closure runs, and plain SGD "
        "then moves the weights 65536 times too far. LBFGS, which needs a closure, does not work with a GradScaler."
    ),
    fix=(
        "Run the forward and the scaled backward before `scaler.step(optimizer)`, without a closure; with LBFGS, train "
        "in float32 or bfloat16 and without a GradScaler."
    ),
    bad="scaler.step(optimizer, closure)\nscaler.update()",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
)
NEEDS = (("caler",), (".step(",), ("closure", "LBFGS"))

NEEDS_A_CLOSURE = ("torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS")


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        for event in region.events:
            call = event.node
            if not isinstance(call, ast.Call):
                continue
            if event.kind == "scaler step" and _given_closure(call, call.args[1:], event) and _is_at_hand(event):
                yield RULE.at(event.place, "GradScaler.step does not support closures")
            elif event.kind == "scaler step" and _is_lbfgs(call, event):
                yield RULE.at(event.place, "LBFGS needs a closure, which GradScaler.step does not support")
            elif event.kind == "optimizer step" and _scaled_in_closure(call, event, region):
                yield RULE.at(event.place, "the closure's gradients are multiplied by the loss scale when applied")


def _given_closure(call: ast.Call, further: list[ast.expr], event: Event) -> ast.expr | None:
    named = keyword(call, "closure")
    candidates = further[:1] if named is None else [named]
    return next((argument for argument in candidates if _is_closure(argument, event)), None)


def _is_closure(argument: ast.expr, event: Event) -> bool:
    """A function; a wrapper's ``closure=None`` that it only hands on is none."""
    if isinstance(argument, ast.Lambda):
        return True
    if not isinstance(argument, ast.Name | ast.Attribute):
        return False
    if isinstance(event.frame.definition(argument), Function):
        return True
    made = [value.node for value in event.frame.values(argument)]
    return "closure" in (dotted_text(argument) or "").lower() and any(
        isinstance(node, ast.Call | ast.Lambda) for node in made
    )


def _is_at_hand(event: Event) -> bool:
    """``self.state.scaler``, made in another file, may be of a class that does take closures."""
    return isinstance(event.receiver, ast.Name) or bool(scalers_held(event.receiver, event.frame))


def _is_lbfgs(call: ast.Call, event: Event) -> bool:
    if not call.args:
        return False
    values = event.frame.values(call.args[0])
    return bool(values) and all(
        isinstance(value.node, ast.Call) and value.frame.qualified(value.node.func) in NEEDS_A_CLOSURE
        for value in values
    )


@functools.lru_cache(maxsize=2)
def _kinds_by_function(region: Region) -> dict[Function, set[str]]:
    """The kinds of events that happen in each function, or in those it calls."""
    found: dict[Function, set[str]] = {}
    for event in region.events:
        for frame in event.frame.callers():
            found.setdefault(frame.function, set()).add(event.kind)
    return found


def _scaled_in_closure(call: ast.Call, event: Event, region: Region) -> bool:
    """``optimizer.step(closure)`` where the closure scales the loss and leaves the gradients scaled."""
    closure = _given_closure(call, call.args, event)
    target = event.frame.definition(closure) if isinstance(closure, ast.Name) else None
    if not isinstance(target, Function):
        return False
    inside = _kinds_by_function(region).get(target, set())
    return "scaled backward" in inside and not inside & {"unscale", "opaque", "scaler step"}
