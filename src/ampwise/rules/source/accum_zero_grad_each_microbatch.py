"""Gradients that are to accumulate, set to zero with every micro-batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.accumulation import Window, windows_of
from ampwise.source.events import Event
from ampwise.source.names import dotted_text
from ampwise.source.project import Code

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP206",
    name="accum-zero-grad-each-microbatch",
    severity=Severity.WARNING,
    summary="`zero_grad` runs with every micro-batch, so nothing accumulates.",
    why=(
        "The step is taken after n micro-batches, but the gradients of all of them except the last are thrown away: "
        "n - 1 of n backward passes are wasted, the batch is n times smaller than meant, and where the loss is divided "
        "by n the update is too."
    ),
    fix="Call `optimizer.zero_grad()` right after the step, in the branch that takes it.",
    bad=(
        "optimizer.zero_grad()\nscaler.scale(loss / n).backward()\nif (i + 1) % n == 0:\n"
        "    scaler.step(optimizer)\n    scaler.update()"
    ),
    good=(
        "scaler.scale(loss / n).backward()\nif (i + 1) % n == 0:\n    scaler.step(optimizer)\n"
        "    scaler.update()\n    optimizer.zero_grad()"
    ),
)
NEEDS = ((".backward(",), ("zero_grad", "grad = None"), ("autocast", "caler", "float16", ".half("))

WHOLE_MODEL = frozenset(("model", "net", "network"))


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        found: set[Event] = set()
        for window in windows_of(region):
            for event, _ in window.visits("zero grad"):
                if event not in found and _clears_what_accumulates(event, window):
                    found.add(event)
                    yield RULE.at(event.place, "the gradients of the micro-batches before are thrown away")


def _clears_what_accumulates(event: Event, window: Window) -> bool:
    """The optimizer that is stepped, or the whole model; with two optimizers it may be the other one's business."""
    steps = {step.other if step.kind == "scaler step" else step.key for step in _steps(window)}
    if len(steps) != 1 or not isinstance(event.node, ast.Call) or window.further_guards(event):
        return False
    if event.key is not None and event.key in steps:
        return True
    receiver = event.node.func.value if isinstance(event.node.func, ast.Attribute) else event.node
    return (dotted_text(receiver) or "").rpartition(".")[2] in WHOLE_MODEL


def _steps(window: Window) -> Iterator[Event]:
    return (event for event in window.region.events if event.kind in ("scaler step", "optimizer step"))
