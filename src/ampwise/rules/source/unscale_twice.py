"""``unscale_`` called twice on one optimizer between two updates."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.check.source.accumulation import is_fixed_name
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.project import SourceFile
from ampwise.check.source.questions import guard_source
from ampwise.check.source.steps import Moment, Region
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP103",
    name="unscale-twice",
    severity=Severity.ERROR,
    summary="`scaler.unscale_` is called twice on one optimizer before `scaler.update`.",
    why=(
        "The scaler records which optimizers it has unscaled since the last `update()`. A second "
        "`unscale_(optimizer)` raises RuntimeError: `unscale_() has already been called on this optimizer since the "
        "last update()`. If it did not, the gradients would be divided by the loss scale twice."
    ),
    fix="Keep the first `scaler.unscale_(optimizer)` and remove the second.",
    bad=(
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nlog(grad_norm(model))\n"
        "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\nscaler.update()"
    ),
    good=(
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nlog(grad_norm(model))\n"
        "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\nscaler.update()"
    ),
)
NEEDS = (("unscale_",),)

# Tests of gradients, their norm, or the loss.
BAD_STEP = LazyPattern(r"nan|isinf|_inf|finite|overflow", re.IGNORECASE)


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        for event, moments in region.visits("unscale"):
            first = [_before(moment) for moment in moments]
            if first and all(first) and _names_one_optimizer(event):
                before = next(found for found in first if found)
                yield RULE.at(event.place, f"this optimizer's gradients were already unscaled in {before.spot(event)}")
            elif region.loop is not None and (update := _update_that_bad_steps_miss(event, moments, region)):
                yield RULE.at(
                    event.place,
                    f"a bad step skips the update in {update.spot(event)}, and the next iteration unscales again",
                )


def _update_that_bad_steps_miss(event: SourceEvent, moments: list[Moment], region: Region) -> SourceEvent | None:
    """Return the update skipped for non-finite gradients: ``if not has_nan: scaler.step(); scaler.update()``."""
    updates = _updates_of_finite_steps(region).get(event.key, [])
    if not any(_misses_the_update(moment) for moment in (moments if updates else ())):
        return None
    return next((update for update in updates if _tests_finite(update, event)), None)


@functools.lru_cache(maxsize=2)
def _updates_of_finite_steps(region: Region) -> dict[str | None, list[SourceEvent]]:
    """Return the updates under a finiteness test, by scaler."""
    found: dict[str | None, list[SourceEvent]] = {}
    for event in region.events:
        if event.kind == "update" and any(BAD_STEP.search(guard_source(guard)) for guard in event.context.guards):
            found.setdefault(event.key, []).append(event)
    return found


def _misses_the_update(moment: Moment) -> bool:
    updated = any(update.key == moment.event.key for update in moment.later("update"))
    goes_on = moment.path.ended in (None, "continue")
    return not updated and goes_on and not moment.opaque and not any(True for _ in moment.later("opaque"))


def _tests_finite(update: SourceEvent, event: SourceEvent) -> bool:
    beyond = [guard for guard in update.context.guards if guard not in event.context.guards]
    asked = " ".join(guard_source(guard) for guard in beyond)
    return bool(BAD_STEP.search(asked)) and len(beyond) == 1


def _before(moment: Moment) -> SourceEvent | None:
    """Return the unscale of the same optimizer by the same scaler since the last update on this path."""
    event = moment.event
    if moment.opaque or event.key is None or event.other is None:
        return None
    earlier = moment.unscaled.get((event.key, event.other))
    return earlier if earlier is not None and _names_one_optimizer(earlier) else None


def _names_one_optimizer(event: SourceEvent) -> bool:
    """Return whether the name means one optimizer; in ``for opt in generators: unscale_(opt)`` it changes."""
    node = event.node
    return isinstance(node, ast.Call) and bool(node.args) and is_fixed_name(node.args[0], event)
