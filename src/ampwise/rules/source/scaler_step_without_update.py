"""A scaler that steps and never updates its scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Edit, Finding, Rule, Severity
from ampwise.source.events import Event
from ampwise.source.names import dotted_text
from ampwise.source.project import Code
from ampwise.source.steps import Moment

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP105",
    name="scaler-step-without-update",
    severity=Severity.ERROR,
    summary="`scaler.step` is never followed by `scaler.update`.",
    why=(
        "`update` resets what the scaler remembers of this iteration and adapts the scale. Without it the next "
        "iteration's `step` raises, though only where the scaler is on: a script tried on a machine without a GPU, or "
        "with `enabled=False`, seems to work."
    ),
    fix="Call `scaler.update()` once an iteration, after the last `scaler.step`.",
    bad="scaler.scale(loss).backward()\nscaler.step(optimizer)",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    fixable="always",
)
NEEDS = (("caler",), (".backward(",), (".step(",))


def check(code: Code) -> Iterator[Finding]:
    updated = {event.key for event in code.events if event.kind == "update"}
    given_away = {key for event in code.events if event.kind == "opaque" for key in event.keys}
    for region in code.regions:
        if region.hidden:
            continue
        for step, moments in region.visits("scaler step"):
            if step.key in updated | given_away or _has_hidden_base(step):
                continue
            if all(moment.scaled and not _is_followed(moment) for moment in moments):
                yield RULE.at(step.place, "the scale is never updated after this step", edits=_update_after(step))


def _has_hidden_base(step: Event) -> bool:
    """Whether ``self.scaler`` belongs to a class whose base, which we cannot see, may update it."""
    owner = step.frame.instance_of
    if owner is None:
        return False
    ancestry = step.frame.ancestry(owner)
    known = {"object", "Module", "ABC", *(cls.name for cls in ancestry)}
    bases = (dotted_text(base) or "" for cls in ancestry for base in cls.node.bases)
    return any(base.rpartition(".")[2] not in known for base in bases)


def _is_followed(moment: Moment) -> bool:
    """By an update, or by the step of another optimizer, which is then the place for one."""
    step = moment.event
    others = (event for event in moment.later("scaler step") if event.key == step.key and event.node is not step.node)
    return any(True for _ in (*moment.later("update"), *others))


def _update_after(step: Event) -> tuple[Edit, ...]:
    call = step.node
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    script = step.frame.outline.script
    return (script.insert_after(call, f"{script.segment(call.func.value)}.update()"),)
