from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ampwise.check.source.accumulation import names_one_optimizer
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.questions import guard_source
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Moment, SourceEvent, SourceFile
    from ampwise.watch.run_events import Unscale

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


def check_source(code: SourceFile) -> Findings:
    for region in code.visible_regions:
        finite: dict[str | None, list[SourceEvent]] = {}  # updates under a finiteness test, by scaler
        for update in region.events_of("update"):
            if any(BAD_STEP.search(guard_source(guard)) for guard in update.context.guards):
                finite.setdefault(update.key, []).append(update)
        for event, moments in region.visits("unscale"):
            # The unscale of the same optimizer by the same scaler since the last update, on each path.
            known = event.key is not None and event.other is not None and names_one_optimizer(event)
            visible = [moment for moment in moments if known and not moment.opaque]
            earlier = [before for m in visible if (before := m.unscaled.get((event.key, event.other)))]
            if earlier and len(earlier) == len(moments) and all(map(names_one_optimizer, earlier)):
                line = earlier[0].spot(event)
                yield RULE.at(event.place, f"this optimizer's gradients were already unscaled in {line}")
            elif region.loop is not None:
                missed = _update_that_bad_steps_miss(event, moments, finite.get(event.key, []))
                if missed is not None:
                    line = missed.spot(event)
                    yield RULE.at(
                        event.place, f"a bad step skips the update in {line}, and the next iteration unscales again"
                    )


def _update_that_bad_steps_miss(
    event: SourceEvent, moments: list[Moment], updates: list[SourceEvent]
) -> SourceEvent | None:
    """Return the update skipped for non-finite gradients: ``if not has_nan: scaler.step(); scaler.update()``."""
    for moment in moments if updates else ():
        updated = any(update.key == event.key for update in moment.later("update"))
        goes_on = moment.path.ended in (None, "continue")
        if not updated and goes_on and not moment.opaque and not any(moment.later("opaque")):
            break
    else:
        return None
    for update in updates:
        beyond = [guard for guard in update.context.guards if guard not in event.context.guards]
        if len(beyond) == 1 and BAD_STEP.search(guard_source(beyond[0])):
            return update
    return None


def check_event(unscale: Unscale) -> Findings:
    if unscale.again:
        yield RULE.at(
            unscale.site.place, "`unscale_` is called a second time before `update`: torch raises an error here"
        )
