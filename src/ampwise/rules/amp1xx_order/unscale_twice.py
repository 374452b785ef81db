from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.accumulation import names_one_optimizer
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Moment, SourceEvent, SourceFile
    from ampwise.watch.run_events import Unscale

RULE = Rule(
    code="AMP103",
    name="unscale-twice",
    severity=Severity.ERROR,
    summary="`scaler.unscale_` is called twice on one optimizer before `scaler.update`.",
    why=(
        "The scaler records which optimizers it has unscaled since the last `update()`. A second "
        "`unscale_(optimizer)` raises RuntimeError: `unscale_() has already been called on this optimizer since the "
        "last update()`. If it did not, the gradients would be divided by the loss scale twice."
    ),
    fix="Keep the first `scaler.unscale_(optimizer)` and remove the second.",
    bad=(
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nlog(grad_norm(model))\n"
        "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\nscaler.update()"
    ),
    good=(
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nlog(grad_norm(model))\n"
        "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\nscaler.update()"
    ),
)
NO_UPDATE = (
    "Call `scaler.update()` in each iteration that calls `scaler.unscale_`, also where it leaves out the step. When "
    "gradients accumulate, unscale them once, just before the step."
)
NEEDS = (("unscale_(",),)


def check_source(code: SourceFile) -> Findings:
    for region in code.visible_regions:
        for event, moments in region.visits("unscale"):
            # The unscale of the same optimizer by the same scaler since the last update, on each path.
            known = event.key is not None and event.other is not None and names_one_optimizer(event)
            visible = [moment for moment in moments if known and not moment.opaque]
            earlier = [before for m in visible if (before := m.unscaled.get((event.key, event.other)))]
            again = [before for before in earlier if before.node is not event.node]  # not the same line in a loop
            if again and len(earlier) == len(moments) and all(map(names_one_optimizer, earlier)):
                line = again[0].spot(event)
                yield RULE.at(event.place, f"this optimizer's gradients were already unscaled in {line}")
            elif known and (step := _step_of_another(event, moments)) is not None:
                yield RULE.at(
                    event.place,
                    f"another scaler scaled these gradients, and its `step` in {step.spot(event)} unscales them again",
                    fix="Unscale with the scaler that scaled the loss and takes the step.",
                )


def _step_of_another(unscale: SourceEvent, moments: list[Moment]) -> SourceEvent | None:
    """Return the step of the scaler that scaled the gradients, if another scaler unscales them on every path."""
    found = None
    for moment in moments:
        after = moment.later("scaler step", "update", "scaled backward", "opaque")
        found = next((event for event in after if event.key != unscale.key), None)
        if moment.opaque or unscale.key in moment.scaled or found is None or found.kind != "scaler step":
            return None
        if found.other != unscale.other or found.key not in moment.scaled:
            return None
    made = [{id(value) for value, _ in event.frame.values(event.receiver)} for event in (unscale, found) if event]
    is_made = all(isinstance(value, ast.Call) for value, _ in unscale.frame.values(unscale.receiver))
    return found if len(made) == 2 and is_made and made[0].isdisjoint(made[1]) else None


def check_event(unscale: Unscale) -> Findings:
    if not unscale.again or unscale.left_overflow:  # AMP115
        return
    raises = "torch raises an error here"
    if not unscale.new_pass or unscale.earlier is None:
        yield RULE.at(unscale.site.place, f"`unscale_` is called a second time before `update`: {raises}")
        return
    is_same = (unscale.earlier.file, unscale.earlier.line) == (unscale.site.file, unscale.site.line)
    where = "this line" if is_same else unscale.earlier.in_text
    yield RULE.at(
        unscale.site.place,
        f"there was a new backward pass, but no `update`, since the `unscale_` at {where}: {raises}",
        fix=NO_UPDATE,
    )
