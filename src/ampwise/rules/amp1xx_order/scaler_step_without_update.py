from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.names import dotted_text, method_called
from ampwise.check.source.statement_order import is_certainly_grad_scaler, statement_range
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Moment, Region, SourceEvent, SourceFile
    from ampwise.watch.run_events import ScalerStep

RULE = Rule(
    code="AMP105",
    name="scaler-step-without-update",
    severity=Severity.ERROR,
    summary="`scaler.step` is never followed by `scaler.update`.",
    why=(
        "`update` resets the scaler's per-iteration state and adapts the scale. Without it the next iteration's "
        "`step` raises an error, but only if the scaler is enabled: a script tested on a machine without a GPU, or "
        "with `enabled=False`, seems to work."
    ),
    fix="Call `scaler.update()` once per iteration, after the last `scaler.step`.",
    bad="scaler.scale(loss).backward()\nscaler.step(optimizer)",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    fixable="sometimes",
)
NEEDS = (("caler",), (".backward(",), (".step(",))


def check_source(code: SourceFile) -> Findings:
    updated = {event.key for event in code.events if event.kind == "update"}
    passed_on = {key for event in code.events if event.kind == "opaque" for key in event.keys}
    for region in code.visible_regions:
        for step, moments in region.visits("scaler step"):
            if step.key in updated or step.key in passed_on or _has_hidden_base(step):
                continue
            # An update follows, or another optimizer's step, which is then the place for one.
            followed = any(
                event.kind == "update" or (event.key == step.key and event.node is not step.node)
                for moment in moments
                for event in moment.later("update", "scaler step")
            )
            if not followed and all(moment.scaled for moment in moments):
                edits, doubt = _update_after(step, moments, region, code)
                fix = f"{RULE.fix} Not a safe fix: {doubt}." if doubt else None
                if not edits:
                    fix = RULE.without_edit("this step is one of several, or not a statement of its own")
                yield RULE.at(
                    step.place,
                    "the scale is never updated after this step",
                    fix=fix,
                    edits=edits,
                    safe=doubt is None,
                )


def _has_hidden_base(step: SourceEvent) -> bool:
    """Return whether ``self.scaler`` belongs to a class with a base, defined elsewhere, that may update it."""
    owner = step.frame.instance_of
    ancestry = step.frame.ancestry(owner) if owner is not None else []
    known = {"object", "Module", "ABC", *(cls.name for cls in ancestry)}
    bases = (dotted_text(base) or "" for cls in ancestry for base in cls.node.bases)
    return any(base.rpartition(".")[2] not in known for base in bases)


def _update_after(
    step: SourceEvent, moments: list[Moment], region: Region, code: SourceFile
) -> tuple[tuple[Edit, ...], str | None]:
    """Return the edit that adds ``scaler.update()``, if the step is its own statement, executed once per iteration,
    and why the update may not be missing: a second one in an iteration raises an error.
    """
    backwards = [backward for moment in moments for backward in moment.scaled.values()]
    loops = step.context.loops
    once = all(loops == backward.context.loops[: len(loops)] for backward in backwards)
    scaler = dotted_text(step.receiver)
    alone = statement_range(step, step)
    if not once or scaler is None or alone is None or isinstance(alone.first, ast.Return):
        return (), None
    doubt = None
    if region.loop is None:
        doubt = "the caller of this step may update the scale after it"
    elif any(method_called(call) == "update" and not (call.args or call.keywords) for call in code.nodes(ast.Call)):
        doubt = "there is an `update()` call that may be the scaler's"
    elif not is_certainly_grad_scaler(step, code):
        doubt = "it is unclear whether the scaler is always a GradScaler"
    return (step.frame.outline.script.insert_after(step.node, f"{scaler}.update()"),), doubt


def check_event(step: ScalerStep) -> Findings:
    if step.again:
        yield RULE.at(
            step.site.place, "the second `scaler.step` without a `scaler.update` in between: torch raises an error here"
        )
