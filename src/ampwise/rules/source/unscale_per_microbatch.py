"""``unscale_`` called with every micro-batch of an accumulation window."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.accumulation import fixed_name, windows_of
from ampwise.source.events import Event
from ampwise.source.project import Code

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP104",
    name="unscale-per-microbatch",
    severity=Severity.ERROR,
    summary="Gradients are unscaled with every micro-batch, but applied only after several.",
    why=(
        "Unscaled gradients and the next micro-batch's scaled ones add up to neither: the sum is dominated by the "
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


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        found: set[Event] = set()
        for window in windows_of(region):
            for event, _ in window.visits("unscale"):
                if event not in found and _is_call_on_one_optimizer(event) and not window.only_sometimes(event):
                    found.add(event)
                    yield RULE.at(event.place, "unscaled with every micro-batch, while the step waits for the last")


def _is_call_on_one_optimizer(event: Event) -> bool:
    """``scaler.unscale_(optimizer)``; a division by hand may be part of a scheme of its own."""
    node = event.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "unscale_":
        return False
    return bool(node.args) and fixed_name(node.args[0], event)
