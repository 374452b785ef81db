"""``unscale_`` called on every micro-batch of an accumulation window."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.accumulation import accumulation_windows, is_fixed_name
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.project import SourceFile
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP104",
    name="unscale-per-microbatch",
    severity=Severity.ERROR,
    summary="Gradients are unscaled on every micro-batch, but applied only after several.",
    why=(
        "Unscaled gradients and the scaled ones of the next micro-batch cannot be added: the sum is dominated by the "
        "last micro-batches, 65536 times too large. The second `unscale_` before an `update()` raises RuntimeError; "
        "with an `update()` in between it divides what was already divided."
    ),
    fix="Move `scaler.unscale_(optimizer)`, and the clip that needs it, into the branch that takes the step.",
    bad=(
        "scaler.scale(loss / n).backward()\nscaler.unscale_(optimizer)\nif (i + 1) % n == 0:\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()"
    ),
    good=(
        "scaler.scale(loss / n).backward()\nif (i + 1) % n == 0:\n    scaler.unscale_(optimizer)\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()"
    ),
)
NEEDS = (("unscale_",), (".backward(",))


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        found: set[SourceEvent] = set()
        for window in accumulation_windows(region):
            for event, _ in window.visits("unscale"):
                if event not in found and _is_call_on_one_optimizer(event) and not window.only_sometimes(event):
                    found.add(event)
                    yield RULE.at(event.place, "unscales on every micro-batch, but the step comes only after the last")


def _is_call_on_one_optimizer(event: SourceEvent) -> bool:
    """Return whether this is ``scaler.unscale_(optimizer)``; a manual division may be part of another scheme."""
    node = event.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "unscale_":
        return False
    return bool(node.args) and is_fixed_name(node.args[0], event)
