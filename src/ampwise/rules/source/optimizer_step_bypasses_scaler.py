"""Scaled gradients applied by ``optimizer.step()`` itself."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.calls import ANYTHING
from ampwise.source.events import Event
from ampwise.source.paths import MOST_PATHS, Path
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.scaled_losses import surely_scales
from ampwise.source.steps import Moment
from ampwise.source.vocabulary import SCALER

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
NEEDS = (("caler",), (".backward(",), (".step(",))


# Who unscales and asks this before the step does what the scaler would.
ASKS_FOR_INFS = Pattern(r"finite|isinf|isnan|found_inf|overflow|nan", re.IGNORECASE)


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        by_optimizer: dict[str | None, list[Event]] = {}
        for event in region.events:
            if event.kind == "scaler step":
                by_optimizer.setdefault(event.other, []).append(event)
        for step, moments in region.visits("optimizer step"):
            # Where another branch goes through the scaler, the scaler may be off in this one.
            others = by_optimizer.get(step.key, [])
            if not all(surely_scales(other) for other in others) or _knows_a_scaler(step):
                continue
            if all(_bypasses(moment) for moment in moments):
                backward = next(iter(moments[0].scaled.values()))
                yield RULE.at(step.place, f"applies gradients that {backward.spot(step)} scaled, past the scaler")


def _bypasses(moment: Moment) -> bool:
    optimizer = moment.event.key
    if not moment.scaled or moment.opaque or moment.plain or _is_unscaled_by_hand(moment):
        return False
    return optimizer not in _stepped_by_a_scaler(moment.path)


@functools.lru_cache(maxsize=MOST_PATHS)  # every step on a path asks
def _stepped_by_a_scaler(path: Path) -> set[str | None]:
    return {event.other for event in path.events if event.kind == "scaler step"}


def _knows_a_scaler(step: Event) -> bool:
    """Whether the optimizer was made with a scaler, and so may unscale by itself."""
    for value in step.frame.values(step.receiver):
        if isinstance(value.node, ast.Call):
            given = [*value.node.args, *(word.value for word in value.node.keywords)]
            if any(value.frame.role(argument) == SCALER for argument in given):
                return True
    return False


def _is_unscaled_by_hand(moment: Moment) -> bool:
    """Divided by the scale in a loop of one's own, or unscaled by the scaler and then looked at for infs."""
    if any(scaler == ANYTHING for scaler, _ in moment.unscaled):
        return True
    tests = (guard.test for guard in moment.event.context.guards if guard.test is not None)
    return bool(moment.unscaled) and any(ASKS_FOR_INFS.search(ast.unparse(test)) for test in tests)
