"""A plain backward whose gradients the scaler then unscales."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Edit, Finding, Rule, Severity
from ampwise.source.calls import ANYTHING
from ampwise.source.conditions import is_always_bound, stretch, surely_a_grad_scaler
from ampwise.source.events import Event
from ampwise.source.names import dotted_text
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.scaled_losses import may_be_scaled, surely_scales
from ampwise.source.steps import Moment, Region

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
SCALES_BY_HAND = Pattern(r"get_scale\(|\._scale\b|\.grad\b|register_hook")


APPLIES = ("scaled backward", "opaque", "optimizer step", "zero grad", "unscale", "scaler step")


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        found = [] if region.hidden else list(_unscaled(region))
        edits, doubt = _scaled(found, region, code)
        for backward, step in found:
            yield RULE.at(
                backward.place,
                f"the scaler unscales these gradients in {step.spot(backward)}, and they were never scaled",
                fix=f"{RULE.fix} Not a safe fix: {doubt}." if edits and doubt else None,
                edits=edits,
                safe=doubt is None,
            )


def _unscaled(region: Region) -> Iterator[tuple[Event, Event]]:
    """The plain backwards, each with the scaler's step that applies it."""
    for backward, moments in region.visits("backward"):
        applied = [moment for moment in moments if _is_applied(moment)]
        steps = [step for moment in applied if (step := _step_of(moment))]
        # Beside a branch that scales, this may be the one where the scaler is off and leaves gradients alone.
        if region.has("scaled backward") and not all(surely_scales(step) for step in steps):
            continue
        if steps and len(steps) == len(applied) and not may_be_scaled(backward):
            yield backward, steps[0]


def _is_applied(moment: Moment) -> bool:
    """Whether something may be done with these gradients on this path; amid a window they are only added up."""
    return any(True for _ in moment.later("scaler step", "optimizer step", "scaled backward", "opaque"))


def _step_of(moment: Moment) -> Event | None:
    """The scaler's step that applies this backward, when nothing else may have touched the gradients."""
    if any(True for _ in moment.earlier("scaled backward", "opaque")):
        return None
    for event in moment.later(*APPLIES):
        if event.kind == "scaler step":
            return event
        if event.kind != "unscale" or event.key == ANYTHING:
            return None
    return None


def _scaled(found: list[tuple[Event, Event]], region: Region, code: Code) -> tuple[tuple[Edit, ...], str | None]:
    """Every loss of the step wrapped in ``scaler.scale``, or none: scaled and unscaled gradients do not add up."""
    scalers = {dotted_text(step.receiver) for _, step in found}
    (scaler,) = scalers if len(scalers) == 1 else (None,)
    is_all = {backward.node for backward, _ in found} == {e.node for e in region.events if e.kind == "backward"}
    is_all = is_all and len({backward.frame.outline for backward, _ in found}) == 1
    if scaler is None or not is_all or not all(_can_be_wrapped(backward, step) for backward, step in found):
        return (), None
    script = found[0][0].frame.outline.script
    edits = [script.replace(loss, f"{scaler}.scale({script.segment(loss)})") for loss in _losses(found)]
    doubts = (_doubt(backward, step, scaler, code) for backward, step in found)
    return tuple(edits), next((doubt for doubt in doubts if doubt), None)


def _losses(found: list[tuple[Event, Event]]) -> list[ast.expr]:
    return list(dict.fromkeys(backward.value for backward, _ in found if backward.value is not None))


def _can_be_wrapped(backward: Event, step: Event) -> bool:
    """Whether ``loss.backward()`` stands there, in the function that has the scaler, and in this file."""
    call = backward.node
    is_method = (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.value is backward.value
    )
    return is_method and step.frame is backward.frame and backward.value is not None


def _doubt(backward: Event, step: Event, scaler: str, code: Code) -> str | None:
    if not surely_a_grad_scaler(step, code):
        return "whether the scaler is always a GradScaler cannot be seen"
    between = stretch(backward, step)
    surely_steps = between is not None and not between.may_be_left and not between.rebinds(scaler)
    if not surely_steps and not is_always_bound(step):
        return "there may be no scaler at the backward"
    if SCALES_BY_HAND.search(backward.frame.outline.script.text):
        return "something may scale the gradients by hand"
    return None
