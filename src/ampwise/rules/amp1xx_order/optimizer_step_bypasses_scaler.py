from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING

from ampwise.check.source.call_events import ANYTHING
from ampwise.check.source.execution_paths import MOST_PATHS
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.questions import guard_source
from ampwise.check.source.scaled_losses import is_certainly_scaled
from ampwise.check.source.torch_names import SCALER
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import ExecutionPath, Moment, SourceEvent, SourceFile
    from ampwise.watch.run_events import OptimizerStep

RULE = Rule(
    code="AMP109",
    name="optimizer-step-bypasses-scaler",
    severity=Severity.ERROR,
    summary="The backward is scaled, but `optimizer.step()` is called directly.",
    why=(
        "The gradients are still multiplied by the loss scale, so the update is 65536 times too large (Adam hides "
        "this, weight decay and clipping do not); and nothing skips a step whose gradients overflowed to inf, which "
        "destroys the weights."
    ),
    fix="Call `scaler.step(optimizer)` instead, then `scaler.update()`.",
    bad="scaler.scale(loss).backward()\noptimizer.step()\nscaler.update()",
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
)
NEEDS = (("caler",), (".backward(",), (".step(",))

# Code that unscales and checks this before the step does what the scaler would.
CHECKS_FOR_INF = LazyPattern(r"finite|isinf|isnan|found_inf|overflow|nan", re.IGNORECASE)


def check_source(code: SourceFile) -> Findings:
    for region in code.visible_regions:
        by_optimizer: dict[str | None, list[SourceEvent]] = {}
        for event in region.events_of("scaler step"):
            by_optimizer.setdefault(event.other, []).append(event)
        for step, moments in region.visits("optimizer step"):
            # If another branch goes through the scaler, the scaler may be disabled in this one.
            surely_on = all(is_certainly_scaled(other) for other in by_optimizer.get(step.key, []))
            if (
                surely_on
                and not _is_in_a_scaler(step)
                and not _holds_scaler(step)
                and all(_bypasses(moment) for moment in moments)
            ):
                line = moments[0].backward.spot(step)
                yield RULE.at(step.place, f"applies gradients that {line} scaled, bypassing the scaler")


def _bypasses(moment: Moment) -> bool:
    if not moment.scaled or moment.opaque or moment.plain:
        return False
    if any(scaler == ANYTHING for scaler, _ in moment.unscaled):
        return False  # the gradients are divided by the scale
    if moment.unscaled and any(CHECKS_FOR_INF.search(guard_source(guard)) for guard in moment.event.context.guards):
        return False
    return moment.event.key not in _stepped_by_a_scaler(moment.path)


@functools.lru_cache(maxsize=MOST_PATHS)  # called for every step on a path
def _stepped_by_a_scaler(path: ExecutionPath) -> set[str | None]:
    return {event.other for event in path.events if event.kind == "scaler step"}


def _holds_scaler(step: SourceEvent) -> bool:
    """Return whether the optimizer was created with a scaler, and so may unscale by itself."""
    for value in step.frame.values(step.receiver):
        if isinstance(value.node, ast.Call):
            given = [*value.node.args, *(word.value for word in value.node.keywords)]
            if any(value.frame.role(argument) == SCALER for argument in given):
                return True
    return False


def _is_in_a_scaler(step: SourceEvent) -> bool:
    """Return whether a scaler class of the script's own makes the step, for example when it is disabled."""
    owner = step.frame.function.owner
    bases = owner.node.bases if owner is not None else []
    return any((dotted_text(base) or "").endswith("GradScaler") for base in bases)


def check_event(step: OptimizerStep) -> Findings:
    if step.scaled:
        what = "unscaled gradients directly" if step.unscaled else "gradients multiplied by the loss scale"
        yield RULE.at(
            step.site.place,
            f"`{step.optimizer}.step` applies {what}; only `scaler.step` would skip non-finite gradients",
        )
