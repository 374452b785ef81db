"""``scaler.update()`` called on every micro-batch of an accumulation window."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.accumulation import accumulation_windows
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.project import SourceFile
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP106",
    name="update-per-microbatch",
    severity=Severity.ERROR,
    summary="The loss scale is updated on every micro-batch, but gradients are applied only after several.",
    why=(
        "`update()` may change the loss scale, and the gradients accumulated in one window then have different "
        "scales, which no single division can correct. If nothing was unscaled or stepped since the last one, "
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


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        found: set[SourceEvent] = set()
        for window in accumulation_windows(region):
            for event, _ in window.visits("update"):
                if event not in found and not _sets_a_scale(event) and not window.only_sometimes(event):
                    found.add(event)
                    yield RULE.at(event.place, "the scale may change between the micro-batches of one step")


def _sets_a_scale(event: SourceEvent) -> bool:
    """Return whether the call sets a scale: ``scaler.update(new_scale)`` is a custom schedule."""
    return isinstance(event.node, ast.Call) and bool(event.node.args or event.node.keywords)
