"""Scaled gradients applied by ``optimizer.step()`` itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding import Finding, Rule, Severity

if TYPE_CHECKING:
    from ampwise.source.project import Code
    from ampwise.source.steps import Moment

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP109",
    name="optimizer-step-bypasses-scaler",
    severity=Severity.ERROR,
    summary="The backward is scaled, and `optimizer.step()` is called directly.",
    why=(
        "The gradients are still multiplied by the loss scale, so the update is 65536 times too large (Adam hides "
        "it, weight decay and clipping do not); and nothing stops a step whose gradients overflowed to inf, which "
        "destroys the weights."
    ),
    fix="Call `scaler.step(optimizer)` instead, then `scaler.update()`.",
    bad="scaler.scale(loss).backward()\noptimizer.step()\nscaler.update()",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
)


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        for step, moments in region.visits("optimizer step"):
            if all(_bypasses(moment) for moment in moments):
                backward = next(iter(moments[0].scaled.values()))
                yield RULE.at(step.place, f"applies gradients that line {backward.line} scaled, past the scaler")


def _bypasses(moment: Moment) -> bool:
    optimizer = moment.event.key
    if not moment.scaled or moment.opaque or moment.plain:
        return False
    by_hand = any(key == "*" for key, _ in moment.unscaled)
    around = [*moment.earlier("scaler step"), *moment.later("scaler step")]
    return not by_hand and not any(step.other == optimizer for step in around)
