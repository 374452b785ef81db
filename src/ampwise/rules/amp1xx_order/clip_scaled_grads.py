from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.names import dotted_text
from ampwise.check.source.statement_order import is_certainly_grad_scaler, may_be_retried, statement_range
from ampwise.check.source.steps import STEPS, surely_scaled
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Moment, Region, SourceEvent, SourceFile, StatementRange
    from ampwise.watch.run_events import Clip

RULE = Rule(
    code="AMP101",
    name="clip-scaled-grads",
    severity=Severity.ERROR,
    summary="Gradients are clipped before `scaler.unscale_`.",
    why=(
        "Between `scaler.scale(loss).backward()` and `scaler.step(optimizer)` the gradients are multiplied by the "
        "loss scale, initially 65536. Clipping to norm 1 then means 1/65536 after unscaling: training stalls, or "
        "depends on a loss scale that keeps changing. `scaler.step` unscales too, but only after the clip."
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


def check_source(code: SourceFile) -> Findings:
    for region in code.regions:
        for clip, moments in region.visits("clip"):
            scaled = surely_scaled(moments)
            if not scaled:
                continue
            edits, doubt = _unscale_first(clip, scaled, region, code)
            fix = f"{RULE.fix} Not a safe fix: {doubt}." if doubt else None
            late = next((unscale for moment in scaled for unscale in moment.later("unscale")), None)
            if late is not None:
                fix = f"Move the `unscale_` of {late.spot(clip)} to before the clip; a second one would raise an error."
            yield RULE.at(
                clip.place,
                f"these gradients are still multiplied by the loss scale from {scaled[0].backward.spot(clip)}",
                fix=fix,
                edits=edits,
                safe=doubt is None,
            )


def _unscale_first(
    clip: SourceEvent, moments: list[Moment], region: Region, code: SourceFile
) -> tuple[tuple[Edit, ...], str | None]:
    """Return the edit that adds ``scaler.unscale_(optimizer)`` before the clip, and why it may be unsafe.

    It goes into the block of the step, so it runs exactly when ``scaler.step(optimizer)`` does, whatever ``if`` or loop
    the clip is in. No edit is offered if the gradients are also unscaled elsewhere, or accumulate after the clip.
    """
    steps = {step for moment in moments for step in moment.later("scaler step")}
    added = any(any(moment.later("scaled backward", "backward")) for moment in moments)
    if len(steps) != 1 or added or region.has("unscale") or len(region.events_of(*STEPS)) != 1:
        return (), None
    (step,) = steps
    between = statement_range(clip, step)
    if between is None or not all(_is_before(between, moment.backward, step) for moment in moments):
        return (), None
    assert isinstance(step.node, ast.Call)
    scaler = dotted_text(step.receiver)
    optimizer = dotted_text(step.node.args[0]) if step.node.args else None
    if scaler is None or optimizer is None or between.rebinds(scaler, optimizer):
        return (), None
    edit = clip.frame.outline.script.insert_before(between.first, f"{scaler}.unscale_({optimizer})")
    doubt = None
    if between.may_be_left:
        doubt = "the step may be skipped after the clip, and the next `unscale_` would then raise an error"
    elif may_be_retried(step):
        doubt = "an exception may be caught before the step, and the next `unscale_` would then raise an error"
    elif region.has("opaque"):
        doubt = "a function whose source is not available takes part in the step"
    elif not is_certainly_grad_scaler(step, code):
        doubt = "it is unclear whether the scaler is always a GradScaler"
    return (edit,), doubt


def _is_before(between: StatementRange, backward: SourceEvent, step: SourceEvent) -> bool:
    """Return whether the gradients of ``backward`` are complete when the stretch begins."""
    if step.context.loops != backward.context.loops[: len(step.context.loops)]:
        return False  # in a loop over optimizers, the gradients of the others would still be scaled
    return between.starts_plainly if backward.frame is not step.frame else not between.is_in_first(backward)


def check_event(clip: Clip) -> Findings:
    if clip.scaled and clip.backward is not None:
        yield RULE.at(
            clip.site.place,
            f"`{clip.function}` gets gradients that are still multiplied by the loss scale",
            evidence={} if clip.limit is None else {"limit": f"{clip.limit:g} divided by the loss scale"},
        )
