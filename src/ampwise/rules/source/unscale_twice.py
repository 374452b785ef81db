"""``unscale_`` called twice on one optimizer between two updates."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.accumulation import fixed_name
from ampwise.source.events import Event
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.questions import question
from ampwise.source.steps import Moment, Region

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP103",
    name="unscale-twice",
    severity=Severity.ERROR,
    summary="`scaler.unscale_` is called twice on one optimizer before `scaler.update`.",
    why=(
        "The scaler remembers which optimizers it has unscaled since the last `update()`. A second "
        "`unscale_(optimizer)` raises RuntimeError: `unscale_() has already been called on this optimizer since the "
        "last update()`. Were it allowed, the gradients would be divided by the loss scale twice."
    ),
    fix="Keep the first `scaler.unscale_(optimizer)` and drop the second.",
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

# Asked of gradients, of their norm, or of the loss.
BAD_STEP = Pattern(r"nan|isinf|_inf|finite|overflow", re.IGNORECASE)


def check(code: Code) -> Iterator[Finding]:
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
                    f"a bad step passes over the update of {update.spot(event)}, and the next iteration unscales again",
                )


def _update_that_bad_steps_miss(event: Event, moments: list[Moment], region: Region) -> Event | None:
    """The update that is left out when gradients are not finite: ``if not has_nan: scaler.step(); scaler.update()``."""
    updates = _updates_of_finite_steps(region).get(event.key, [])
    if not any(_misses_the_update(moment) for moment in (moments if updates else ())):
        return None
    return next((update for update in updates if _asks_whether_finite(update, event)), None)


@functools.lru_cache(maxsize=2)
def _updates_of_finite_steps(region: Region) -> dict[str | None, list[Event]]:
    """The updates under a test of whether something is finite, by scaler."""
    found: dict[str | None, list[Event]] = {}
    for event in region.events:
        if event.kind == "update" and any(BAD_STEP.search(question(guard)) for guard in event.context.guards):
            found.setdefault(event.key, []).append(event)
    return found


def _misses_the_update(moment: Moment) -> bool:
    updated = any(update.key == moment.event.key for update in moment.later("update"))
    goes_on = moment.path.ended in (None, "continue")
    return not updated and goes_on and not moment.opaque and not any(True for _ in moment.later("opaque"))


def _asks_whether_finite(update: Event, event: Event) -> bool:
    beyond = [guard for guard in update.context.guards if guard not in event.context.guards]
    asked = " ".join(question(guard) for guard in beyond)
    return bool(BAD_STEP.search(asked)) and len(beyond) == 1


def _before(moment: Moment) -> Event | None:
    """The unscale of the same optimizer, by the same scaler, since the last update on this path."""
    event = moment.event
    if moment.opaque or event.key is None or event.other is None:
        return None
    earlier = moment.unscaled.get((event.key, event.other))
    return earlier if earlier is not None and _names_one_optimizer(earlier) else None


def _names_one_optimizer(event: Event) -> bool:
    """In ``for opt in generators: unscale_(opt)`` the name stands for another optimizer each time."""
    node = event.node
    return isinstance(node, ast.Call) and bool(node.args) and fixed_name(node.args[0], event)
