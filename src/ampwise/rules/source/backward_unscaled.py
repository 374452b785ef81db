"""A plain backward whose gradients the scaler then unscales."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding import Edit, Finding, Rule, Severity

if TYPE_CHECKING:
    from ampwise.source.events import Event
    from ampwise.source.project import Code
    from ampwise.source.steps import Moment

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP108",
    name="backward-unscaled",
    severity=Severity.ERROR,
    summary="`loss.backward()` without `scaler.scale`, and then `scaler.step`.",
    why=(
        "`scaler.step` divides the gradients by the loss scale. If the loss was never multiplied by it, the update "
        "is 65536 times too small, and FP16 gradients underflow as if there were no scaler at all."
    ),
    fix="Call `scaler.scale(loss).backward()`.",
    bad="loss.backward()\nscaler.step(optimizer)\nscaler.update()",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    fixable="sometimes",
)


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        for backward, moments in region.visits("backward"):
            steps = [_step_of(moment) for moment in moments]
            if steps and all(steps):
                step = next(step for step in steps if step)
                yield RULE.at(
                    backward.place,
                    f"the scaler unscales these gradients in line {step.line}, and they were never scaled",
                    edits=_scaled(backward, step),
                )


def _step_of(moment: Moment) -> Event | None:
    """The scaler's step that applies this backward, when nothing else may have touched the gradients."""
    for event in moment.path.events[moment.index + 1 :]:
        if event.kind in ("scaled backward", "opaque", "optimizer step", "unscale"):
            return None
        if event.kind == "scaler step":
            earlier_scaled = any(True for _ in moment.earlier("scaled backward", "opaque"))
            return None if earlier_scaled else event
    return None


def _scaled(backward: Event, step: Event) -> tuple[Edit, ...]:
    call = backward.node
    script = backward.frame.outline.script
    if step.frame is not backward.frame or backward.value is None or not isinstance(call, ast.Call):
        return ()
    if not isinstance(call.func, ast.Attribute) or call.func.value is not backward.value:
        return ()
    assert isinstance(step.node, ast.Call) and isinstance(step.node.func, ast.Attribute)
    scaler, loss = script.segment(step.node.func.value), script.segment(backward.value)
    return (script.replace(backward.value, f"{scaler}.scale({loss.removeprefix('(').removesuffix(')') if _wrapped(loss) else loss})"),)


def _wrapped(text: str) -> bool:
    return text.startswith("(") and text.endswith(")") and text.count("(") == 1
