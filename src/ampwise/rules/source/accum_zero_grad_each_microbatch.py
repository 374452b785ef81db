"""Accumulated gradients that are cleared on every micro-batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.accumulation import AccumulationWindow, accumulation_windows
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.names import dotted_text
from ampwise.check.source.project import SourceFile
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP206",
    name="accum-zero-grad-each-microbatch",
    severity=Severity.WARNING,
    summary="`zero_grad` runs on every micro-batch, so nothing accumulates.",
    why=(
        "The step is taken after n micro-batches, but only the gradients of the last one remain: n - 1 of n backward "
        "passes are wasted, the effective batch is n times smaller than intended, and if the loss is divided by n, so "
        "is the update."
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


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        found: set[SourceEvent] = set()
        for window in accumulation_windows(region):
            for event, _ in window.visits("zero grad"):
                if event not in found and _clears_what_accumulates(event, window):
                    found.add(event)
                    yield RULE.at(event.place, "this discards the gradients of the earlier micro-batches")


def _clears_what_accumulates(event: SourceEvent, window: AccumulationWindow) -> bool:
    """Return whether this clears the stepped optimizer or the whole model; with two optimizers, it may belong to the
    other.
    """
    steps = {step.other if step.kind == "scaler step" else step.key for step in _steps(window)}
    if len(steps) != 1 or not isinstance(event.node, ast.Call) or window.further_guards(event):
        return False
    if event.key is not None and event.key in steps:
        return True
    receiver = event.node.func.value if isinstance(event.node.func, ast.Attribute) else event.node
    return (dotted_text(receiver) or "").rpartition(".")[2] in WHOLE_MODEL


def _steps(window: AccumulationWindow) -> Iterator[SourceEvent]:
    return (event for event in window.region.events if event.kind in ("scaler step", "optimizer step"))
