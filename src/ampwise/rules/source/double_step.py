"""An update that is applied twice."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.check.source.events import SourceEvent
from ampwise.check.source.project import SourceFile
from ampwise.check.source.steps import Moment, Region
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP110",
    name="double-step",
    severity=Severity.ERROR,
    summary="The optimizer is stepped twice for one backward, once of them through the scaler.",
    why=(
        "`scaler.step(optimizer)` calls `optimizer.step()` itself. A second call applies the same gradients again, "
        "advances momentum and the step count, and applies them even when the scaler found inf and skipped."
    ),
    fix="Keep `scaler.step(optimizer)` and remove the other step.",
    bad="scaler.step(optimizer)\noptimizer.step()\nscaler.update()",
    good="scaler.step(optimizer)\nscaler.update()",
)
NEEDS = (("caler",), (".backward(",), (".step(",))


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        for step, moments in region.visits("scaler step", "optimizer step"):
            found = [first for moment in moments if (first := _step_before(moment))]
            certain = len(found) == len(moments) or any(
                _always_comes_after(step, first, region) for first in dict.fromkeys(found)
            )
            if found and certain:
                yield RULE.at(step.place, f"these gradients were already applied in {found[0].spot(step)}")


def _step_before(moment: Moment) -> SourceEvent | None:
    event = moment.event
    optimizer = event.other if event.kind == "scaler step" else event.key
    first = moment.stepped.get(optimizer) if optimizer else None
    if first is None or moment.opaque or (first.kind == event.kind == "optimizer step"):
        return None
    return first


def _always_comes_after(step: SourceEvent, first: SourceEvent, region: Region) -> bool:
    """Return whether every run that takes the first step takes this one too: it has no additional condition."""
    return set(region.own_guards(step)) <= set(region.own_guards(first))
