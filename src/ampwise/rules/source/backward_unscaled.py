"""A plain backward whose gradients the scaler then unscales."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Edit, Finding, Rule, Severity
from ampwise.source.calls import ANYTHING
from ampwise.source.events import Event
from ampwise.source.project import Code
from ampwise.source.scaled_losses import may_be_scaled, surely_scales
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
NEEDS = (("caler",), (".backward(",), (".step(",))


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        for backward, moments in region.visits("backward"):
            applied = [moment for moment in moments if _is_applied(moment)]
            steps = [step for moment in applied if (step := _step_of(moment))]
            # Beside a branch that scales, this may be the one where the scaler is off and leaves gradients alone.
            if region.has("scaled backward") and not all(surely_scales(step) for step in steps):
                continue
            if steps and len(steps) == len(applied) and not may_be_scaled(backward):
                yield RULE.at(
                    backward.place,
                    f"the scaler unscales these gradients in {steps[0].spot(backward)}, and they were never scaled",
                    edits=_scaled(backward, steps[0]),
                )


def _is_applied(moment: Moment) -> bool:
    """Whether something may be done with these gradients on this path; amid a window they are only added up."""
    return any(True for _ in moment.later("scaler step", "optimizer step", "scaled backward", "opaque"))


def _step_of(moment: Moment) -> Event | None:
    """The scaler's step that applies this backward, when nothing else may have touched the gradients."""
    if any(True for _ in moment.earlier("scaled backward", "opaque")):
        return None
    for event in moment.path.events[moment.index + 1 :]:
        if event.kind in ("scaled backward", "opaque", "optimizer step", "zero grad"):
            return None
        if event.kind == "unscale" and event.key == ANYTHING:
            return None
        if event.kind == "scaler step":
            return event
    return None


def _scaled(backward: Event, step: Event) -> tuple[Edit, ...]:
    """The loss wrapped in ``scaler.scale``, where the scaler has the same name in both places."""
    call, loss = backward.node, backward.value
    if step.frame is not backward.frame or not isinstance(call, ast.Call) or loss is None:
        return ()
    if not isinstance(call.func, ast.Attribute) or call.func.value is not loss:
        return ()
    script = backward.frame.outline.script
    return (script.replace(loss, f"{script.segment(step.receiver)}.scale({script.segment(loss)})"),)
