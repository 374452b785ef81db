from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import ITS_SCALER
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.names import dotted_text, last_name, method_called
from ampwise.check.source.precision import argument_of
from ampwise.check.source.statement_order import (
    is_certainly_grad_scaler,
    may_be_retried,
    range_beside,
    range_to_guard,
    statement_range,
)
from ampwise.check.source.steps import STEPS, surely_scaled
from ampwise.check.source.torch_names import CLIPS
from ampwise.check.source.tree_walk import walk
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
NEEDS = (("caler", "Accelerator(", "scale_loss("), (".backward(",), ("clip", "clamp_", "_foreach_", "norm"))

UNSCALES_MANUALLY = LazyPattern(r"get_scale\(|\._scale\b|inv_scale")


def check_source(code: SourceFile) -> Findings:
    yield from _clips_in_apex_block(code)
    for region in code.regions:
        first: dict[SourceEvent, SourceEvent] = {}  # the first clip of each step: one `unscale_` serves them all
        for clip, moments in region.visits("clip"):
            scaled = surely_scaled(moments)
            if not scaled:
                continue
            edits: tuple[Edit, ...] = ()
            doubt = None
            steps = {step for moment in scaled for step in moment.later("scaler step")}
            late = next((unscale for moment in scaled for unscale in moment.later("unscale")), None)
            if scaled[0].backward.key == ITS_SCALER:
                fix = "Clip by `accelerator.clip_grad_norm_`, which unscales first."
            elif late is not None:
                fix = f"Move the `unscale_` of {late.spot(clip)} to before the clip; a second one would raise an error."
            elif any(any(moment.later("scaled backward", "backward")) for moment in scaled):
                fix = "Clip once per step: after the last backward, call `scaler.unscale_(optimizer)` and then clip."
            elif len(steps) > 1:
                calls = [f"`{text}`" for step in steps if (text := _unscale_call(step))]
                together = " and ".join(sorted(set(calls)))
                fix = f"Call {together}, once per step, before the first clip." if calls else RULE.fix
            elif not steps:
                fix = RULE.without_edit("no `scaler.step` follows in the code that was read")
            elif (step := steps.pop()) in first:
                line = first[step].spot(clip)
                fix = f"One `unscale_` before the clip in {line} serves this one, too: not a second one."
            elif any(guard.boundary and guard not in clip.context.guards for guard in step.context.guards):
                fix = f"Move the clip to the step in {step.spot(clip)}, after `unscale_`: it runs in every micro-batch."
            else:
                first[step] = clip
                partial = _partial_optimizer(clip, step)
                if partial is None:
                    edits, doubt = _unscale_first(clip, scaled, step, region, code)
                fix = f"{RULE.fix} Not a safe fix: {doubt}." if doubt else RULE.fix
                if partial is not None:
                    fix = (
                        f"Call `scaler.unscale_(optimizer)`, and clip only what the optimizer of {partial} has: it "
                        "neither unscales nor clears the gradients of the other parameters."
                    )
                elif not edits:
                    fix = _without_edit(clip, step)
            yield RULE.at(
                clip.place,
                f"these gradients are still multiplied by the loss scale from {scaled[0].backward.spot(clip)}",
                fix=fix,
                edits=edits,
                safe=doubt is None,
            )


def _without_edit(clip: SourceEvent, step: SourceEvent) -> str:
    """Return the advice where no edit puts the ``unscale_`` exactly where the step runs, too."""
    if any(guard not in clip.context.guards for guard in step.context.guards):
        fix = f"{RULE.fix} Only where the step in {step.spot(clip)} runs, too: under the same condition."
        return RULE.without_edit("the step has conditions that the clip has not", fix)
    return RULE.without_edit("the clip and the step are not in one block, or other steps come between")


def _clips_in_apex_block(code: SourceFile) -> Findings:
    """Yield the clips in ``with amp.scale_loss(loss, optimizer) as scaled:``, which unscales when it is left."""
    for block in code.nodes(ast.With) if "scale_loss(" in code.script.text else ():
        frame = code.frame(code.function_at(block))
        calls = [item.context_expr for item in block.items if isinstance(item.context_expr, ast.Call)]
        if not any(frame.qualified(call.func) == "apex.amp.scale_loss" for call in calls):
            continue
        backward: ast.Call | None = None
        for statement in block.body:
            for part in walk(statement):
                if isinstance(part, ast.Call) and method_called(part) == "backward":
                    backward = part
                elif backward is not None and isinstance(part, ast.Call) and last_name(part.func) in CLIPS:
                    yield RULE.at(
                        code.script.place(part),
                        f"these gradients are still multiplied by the loss scale from line {backward.lineno}",
                        fix="Clip after the `with` block, which unscales when it is left: "
                        "`clip_grad_norm_(amp.master_params(optimizer), max_norm)`.",
                    )


def _unscale_first(
    clip: SourceEvent, moments: list[Moment], step: SourceEvent, region: Region, code: SourceFile
) -> tuple[tuple[Edit, ...], str | None]:
    """Return the edit that adds ``scaler.unscale_(optimizer)`` before the clip, and why it may be unsafe.

    It must run exactly when ``scaler.step(optimizer)`` does: it goes into the block of the step, whatever ``if`` or
    loop the clip is in, or under a copy of the ``if`` that the step is under. No edit is offered if another optimizer's
    step takes part.
    """
    script, unscale = clip.frame.outline.script, _unscale_call(step)
    steps = [{*moment.earlier(*STEPS), *moment.later(*STEPS)} for moment in moments]  # on each path
    if unscale is None or any(found - {step} for found in steps):
        return (), None
    between = statement_range(clip, step)
    if between is None and all(found == {step} for found in steps):
        backward = moments[0].backward
        if all(step in moment.later("scaler step") for moment in region.moments[backward]):
            between = range_beside(backward, clip, step)
    if between is None:
        guarded = range_to_guard(clip, step)
        if guarded is None or any(found != {step} for found in steps):
            return (), None
        between, guard, condition = guarded
        unscale = f"if {condition}:\n{script.indentation_in(guard)}{unscale}"
    edit = script.insert_before(between.first, unscale)
    if not all(_is_before(between, moment.backward, step) for moment in moments) or between.rebinds(*_names(step)):
        return (), None
    if unscale.count("\n") > 1 or ("\n" in unscale and "\n" not in edit.content):
        return (), None  # the layout does not allow an `if` here
    doubt = _doubt(between, moments, step, region)
    if doubt is None and not is_certainly_grad_scaler(step, code):
        doubt = "it is unclear whether the scaler is always a GradScaler"
    return (edit,), doubt


def _partial_optimizer(clip: SourceEvent, step: SourceEvent) -> str | None:
    """Return the line that gives the optimizer a choice of the parameters, if the clip gets all of a model's."""
    clipped = argument_of(clip.node, "parameters", 0) if isinstance(clip.node, ast.Call) else None
    if clipped is None or not isinstance(step.node, ast.Call) or not step.node.args:
        return None
    if not all(method_called(value) == "parameters" for value, _ in clip.frame.values(clipped)):
        return None
    for made, home in step.frame.values(step.node.args[0]):
        given = argument_of(made, "params", 0) if isinstance(made, ast.Call) else None
        values = home.values(given) if given is not None else []
        # Two choices may make up the whole: weights with decay, and those without.
        if made is not None and len(values) == 1 and isinstance(values[0].node, ast.ListComp | ast.GeneratorExp):
            tests = [ast.unparse(test) for part in values[0].node.generators for test in part.ifs]
            if any("requires_grad" not in test and "is not None" not in test for test in tests):
                return spot(made, home, clip.place)
    return None


def _doubt(between: StatementRange, moments: list[Moment], step: SourceEvent, region: Region) -> str | None:
    """Return why an ``unscale_`` before these statements, which lead to the step, may not be followed by an update."""
    script = step.frame.outline.script
    if between.may_be_left:
        return "the step may be skipped after the clip, and the next `unscale_` would then raise an error"
    if may_be_retried(step):
        return "an exception may be caught before the step, and the next `unscale_` would then raise an error"
    if not all(any(update.key == step.key for update in moment.later("update")) for moment in moments):
        return "no `update()` follows here, and the next `unscale_` would then raise an error"
    if region.has("unscale"):
        return "`unscale_` is also called elsewhere in this step"
    if region.has("opaque"):
        return "a function whose source is not available takes part in the step"
    if any(UNSCALES_MANUALLY.search(script.segment(statement)) for statement in between.statements):
        return "the gradients may be unscaled by hand"
    return None


def _names(step: SourceEvent) -> list[str]:
    """Return the names of the scaler and the optimizer in ``scaler.step(optimizer)``, as far as they have one."""
    assert isinstance(step.node, ast.Call)
    return [name for node in (step.receiver, *step.node.args[:1]) if (name := dotted_text(node))]


def _unscale_call(step: SourceEvent) -> str | None:
    names = _names(step)
    return f"{names[0]}.unscale_({names[1]})" if len(names) == 2 else None


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
            evidence={} if clip.limit is None else {"limit": clip.limit},
        )
