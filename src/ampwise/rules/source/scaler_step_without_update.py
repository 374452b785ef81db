"""A scaler that steps and never updates its scale."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from ampwise.finding import Edit, Finding, Rule, Severity
from ampwise.source.conditions import stretch, surely_a_grad_scaler
from ampwise.source.events import Event
from ampwise.source.names import dotted_text
from ampwise.source.project import Code
from ampwise.source.steps import Moment, Region

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
    fixable="sometimes",
)
NEEDS = (("caler",), (".backward(",), (".step(",))


def check(code: Code) -> Iterator[Finding]:
    updated = {event.key for event in code.events if event.kind == "update"}
    given_away = {key for event in code.events if event.kind == "opaque" for key in event.keys}
    for region in code.regions:
        if region.hidden:
            continue
        for step, moments in region.visits("scaler step"):
            if step.key in updated or step.key in given_away or _has_hidden_base(step):
                continue
            if all(moment.scaled and not _is_followed(moment) for moment in moments):
                edits = _update_after(step, moments)
                doubt = _doubt(step, region, code) if edits else None
                yield RULE.at(
                    step.place,
                    "the scale is never updated after this step",
                    fix=f"{RULE.fix} Not a safe fix: {doubt}." if doubt else None,
                    edits=edits,
                    safe=doubt is None,
                )


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
    return any(True for _ in itertools.chain(moment.later("update"), others))


def _update_after(step: Event, moments: list[Moment]) -> tuple[Edit, ...]:
    """The line ``scaler.update()``, when the step is a statement of its own, made once an iteration."""
    backwards = [backward for moment in moments for backward in moment.scaled.values()]
    loops = step.context.loops
    once = all(loops == backward.context.loops[: len(loops)] for backward in backwards)
    scaler = dotted_text(step.receiver)
    alone = stretch(step, step)
    if not once or scaler is None or alone is None or isinstance(alone.first, ast.Return):
        return ()
    return (step.frame.outline.script.insert_after(step.node, f"{scaler}.update()"),)


def _doubt(step: Event, region: Region, code: Code) -> str | None:
    """Why an update may not be missing: a second one in an iteration raises."""
    if region.loop is None:
        return "whoever runs this step may update the scale after it"
    if any(_updates(node) for node in code.nodes(ast.Call)):
        return "there is an `update()` that may be the scaler's"
    if not surely_a_grad_scaler(step, code):
        return "whether the scaler is always a GradScaler cannot be seen"
    return None


def _updates(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "update" and not (call.args or call.keywords)
