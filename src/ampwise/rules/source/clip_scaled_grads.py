"""Clipping while the gradients are still multiplied by the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Edit, Finding, Rule, Severity
from ampwise.source.events import Event
from ampwise.source.project import Code
from ampwise.source.steps import Moment

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP101",
    name="clip-scaled-grads",
    severity=Severity.ERROR,
    summary="Gradients are clipped before `scaler.unscale_`.",
    why=(
        "Between `scaler.scale(loss).backward()` and `scaler.step(optimizer)` the gradients are multiplied by the "
        "loss scale, 65536 at the start. A clip to norm 1 then clips to 1/65536 after unscaling: training crawls, "
        "or depends on a loss scale that changes by itself. `scaler.step` unscales too, but only after the clip."
    ),
    fix="Call `scaler.unscale_(optimizer)` before the clip; `scaler.step` then does not unscale again.",
    bad=(
        "scaler.scale(loss).backward()\nclip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.step(optimizer)\nscaler.update()"
    ),
    good=(
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.step(optimizer)\nscaler.update()"
    ),
    fixable="sometimes",
)
NEEDS = (("caler",), (".backward(",), ("clip", "clamp_", "_foreach_", "norm"))


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        for clip, moments in region.visits("clip"):
            scaled = [moment for moment in moments if moment.scaled and not moment.stepped]
            if scaled and all(moment.surely_scaled for moment in scaled):
                yield RULE.at(
                    clip.place,
                    f"gradients are still multiplied by the loss scale of {_backward(scaled[0]).spot(clip)}",
                    edits=_unscale_before(clip, scaled),
                )


def _backward(moment: Moment) -> Event:
    return next(iter(moment.scaled.values()))


def _unscale_before(clip: Event, moments: list[Moment]) -> tuple[Edit, ...]:
    """The line ``scaler.unscale_(optimizer)``, spelled as the step that follows spells them."""
    steps = {step for moment in moments for step in moment.later("scaler step")}
    here = [step for step in steps if step.frame is clip.frame]
    plain_path = any(not moment.scaled for moment in moments)
    if len(steps) != 1 or not here or plain_path or here[0].context.loops != _backward(moments[0]).context.loops:
        return ()  # in a loop over optimizers the others' gradients would still be scaled
    call = here[0].node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        return ()
    script = clip.frame.outline.script
    scaler, optimizer = script.segment(call.func.value), script.segment(call.args[0])
    return (script.insert_before(clip.node, f"{scaler}.unscale_({optimizer})"),)
