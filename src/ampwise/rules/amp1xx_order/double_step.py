from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import SourceFile
    from ampwise.watch.run_events import OptimizerStep, ScalerStep

RULE = Rule(
    code="AMP110",
    name="double-step",
    severity=Severity.ERROR,
    summary="The optimizer is stepped twice for one backward, one of them through the scaler.",
    why=(
        "`scaler.step(optimizer)` calls `optimizer.step()` itself. A second call applies the same gradients again, "
        "advances momentum and the step count, and applies them even when the scaler found inf and skipped."
    ),
    fix="Keep `scaler.step(optimizer)` and remove the other step.",
    bad="scaler.step(optimizer)\noptimizer.step()\nscaler.update()",
    good="scaler.step(optimizer)\nscaler.update()",
)
NEEDS = (("caler",), (".backward(",), (".step(",))


def check_source(code: SourceFile) -> Findings:
    for region in code.regions:
        for step, moments in region.visits("scaler step", "optimizer step"):
            optimizer = step.other if step.kind == "scaler step" else step.key
            visible = [moment for moment in moments if optimizer and not moment.opaque]
            firsts = [moment.stepped.get(optimizer) for moment in visible]
            found = [first for first in firsts if first and not first.kind == step.kind == "optimizer step"]
            # Every run that takes the first step takes this one too, if it has no additional condition.
            guards = set(region.own_guards(step))
            if found and (
                len(found) == len(moments)
                or any(guards <= set(region.own_guards(first)) for first in dict.fromkeys(found))
            ):
                yield RULE.at(step.place, f"these gradients were already applied in {found[0].spot(step)}")


def check_event(step: OptimizerStep | ScalerStep) -> Findings:
    if hasattr(step, "bare"):  # a scaler's
        if step.bare:
            yield RULE.at(step.site.place, "`scaler.step` applies gradients that `optimizer.step` has just applied")
    elif step.again:
        yield RULE.at(
            step.site.place,
            "the optimizer steps again with gradients that `scaler.step` has just applied or skipped",
        )
