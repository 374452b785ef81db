"""``scaler.update()`` called with every micro-batch of an accumulation window."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.accumulation import windows_of
from ampwise.source.events import Event
from ampwise.source.project import Code

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP106",
    name="update-per-microbatch",
    severity=Severity.ERROR,
    summary="The loss scale is updated with every micro-batch, but gradients are applied only after several.",
    why=(
        "`update()` may change the loss scale, and then the gradients added up in one window carry different scales: "
        "no single division makes them right. Where nothing was unscaled or stepped since the last one, "
        "`update()` raises AssertionError: `No inf checks were recorded prior to update`."
    ),
    fix="Call `scaler.update()` only after `scaler.step(optimizer)`, in the same branch.",
    bad=(
        "scaler.scale(loss / n).backward()\nif (i + 1) % n == 0:\n    scaler.step(optimizer)\n"
        "    optimizer.zero_grad()\nscaler.update()"
    ),
    good=(
        "scaler.scale(loss / n).backward()\nif (i + 1) % n == 0:\n    scaler.step(optimizer)\n"
        "    scaler.update()\n    optimizer.zero_grad()"
    ),
)
NEEDS = (("caler",), (".backward(",), (".update(",))


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        found: set[Event] = set()
        for window in windows_of(region):
            for event, _ in window.visits("update"):
                if event not in found and not _sets_a_scale(event) and not window.only_sometimes(event):
                    found.add(event)
                    yield RULE.at(event.place, "the scale may change between the micro-batches of one step")


def _sets_a_scale(event: Event) -> bool:
    """``scaler.update(new_scale)`` is somebody's own schedule."""
    return isinstance(event.node, ast.Call) and bool(event.node.args or event.node.keywords)
