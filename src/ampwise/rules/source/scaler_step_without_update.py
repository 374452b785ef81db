"""A scaler that steps and never updates its scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding import Edit, Finding, Rule, Severity

if TYPE_CHECKING:
    from ampwise.source.events import Event
    from ampwise.source.project import Code
    from ampwise.source.steps import Moment

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP105",
    name="scaler-step-without-update",
    severity=Severity.ERROR,
    summary="`scaler.step` is never followed by `scaler.update`.",
    why=(
        "`update` resets what the scaler remembers of this iteration and adapts the scale. Without it the second "
        "`unscale_` or `step` on the same optimizer raises, or, where nothing raises, a scale that once overflows "
        "stays too large: every later step is skipped and the model stops learning without a word."
    ),
    fix="Call `scaler.update()` once an iteration, after the last `scaler.step`.",
    bad="scaler.scale(loss).backward()\nscaler.step(optimizer)",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    fixable="always",
)


def check(code: Code) -> Iterator[Finding]:
    updated = {event.key for event in code.events if event.kind == "update"}
    given_away = {key for event in code.events if event.kind == "opaque" for key in event.keys}
    for region in code.regions:
        if region.hidden:
            continue
        for step, moments in region.visits("scaler step"):
            known = step.key not in updated and step.key not in given_away
            if known and all(moment.scaled and not _followed(moment) for moment in moments):
                yield RULE.at(step.place, "the scale is never updated after this step", edits=_update_after(step))


def _followed(moment: Moment) -> bool:
    return any(True for _ in moment.later("scaler step", "update"))


def _update_after(step: Event) -> tuple[Edit, ...]:
    call = step.node
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    script = step.frame.outline.script
    return (script.insert_after(call, f"{script.segment(call.func.value)}.update()"),)
