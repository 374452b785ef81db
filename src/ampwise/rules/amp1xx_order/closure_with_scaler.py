from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.precision import argument_of
from ampwise.check.source.scalers import scalers_in
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, SourceFile
    from ampwise.watch.run_events import ScalerStep

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
        "Run the forward and the scaled backward before `scaler.step(optimizer)`, without a closure. With LBFGS, "
        "train in FP32 or BF16 without a GradScaler."
    ),
    bad="scaler.step(optimizer, closure)\nscaler.update()",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
)
NEEDS = (("caler",), (".step(",), ("closure", "LBFGS"))

NEEDS_A_CLOSURE = {"torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS"}


def check_source(code: SourceFile) -> Findings:
    for region in code.regions:
        # The kinds of events in each function, or in functions it calls.
        kinds: dict[FunctionOutline, set[str]] = {}
        for event in region.events:
            for caller in event.frame.callers():
                kinds.setdefault(caller.function, set()).add(event.kind)
        for event in region.events:
            call, frame = event.node, event.frame
            if not isinstance(call, ast.Call):
                continue
            if event.kind == "optimizer step":
                closure = _given_closure(call, call.args, frame)
                target = frame.definition(closure) if isinstance(closure, ast.Name) else None
                inside = kinds.get(target, set()) if isinstance(target, FunctionOutline) else set()
                if "scaled backward" in inside and not inside & {"unscale", "opaque", "scaler step"}:
                    yield RULE.at(
                        event.place, "the closure's gradients are applied while still multiplied by the loss scale"
                    )
            if event.kind != "scaler step":
                continue
            # A scaler from another file may be of a class that supports closures.
            is_known = isinstance(event.receiver, ast.Name) or scalers_in(event.receiver, frame)
            if _given_closure(call, call.args[1:], frame) and is_known:
                yield RULE.at(event.place, "GradScaler.step does not support closures")
            elif call.args and set() < frame.makers(call.args[0]) <= NEEDS_A_CLOSURE:
                yield RULE.at(event.place, "LBFGS needs a closure, which GradScaler.step does not support")
            elif "closure" in frame.function.name and set(frame.function.params) <= {frame.function.self_name}:
                yield RULE.at(event.place, "a closure runs inside the optimizer's step: it must not take one itself")


def _given_closure(call: ast.Call, further: list[ast.expr], frame: Frame) -> ast.expr | None:
    """Return the argument that is a function; a wrapper that passes on its ``closure=None`` does not count."""
    named = argument_of(call, "closure")
    for argument in further[:1] if named is None else [named]:
        if isinstance(argument, ast.Lambda):
            return argument
        if isinstance(argument, ast.Name | ast.Attribute):
            made = any(isinstance(value.node, ast.Call | ast.Lambda) for value in frame.values(argument))
            if made and "closure" in (dotted_text(argument) or "").lower():
                return argument
            if isinstance(frame.definition(argument), FunctionOutline):
                return argument
    return None


def check_event(step: ScalerStep) -> Findings:
    if step.closure:
        yield RULE.at(step.site.place, f"`scaler.step` is called with a closure for {step.optimizer}")
