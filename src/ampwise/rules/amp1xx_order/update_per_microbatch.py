from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.accumulation import events_of_each_micro_batch
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AccumulationWindow, SourceEvent, SourceFile
    from ampwise.watch.run_events import ScalerUpdate

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


def check_source(code: SourceFile) -> Findings:
    for event in events_of_each_micro_batch(code, "update", _is_wrong):
        yield RULE.at(event.place, "the scale may change between the micro-batches of one step")


def _is_wrong(event: SourceEvent, window: AccumulationWindow) -> bool:
    # `scaler.update(new_scale)` is a custom schedule.
    sets_a_scale = isinstance(event.node, ast.Call) and bool(event.node.args or event.node.keywords)
    return not sets_a_scale and not window.only_sometimes(event)


def check_event(update: ScalerUpdate) -> Findings:
    if update.pending and not update.steps:
        yield RULE.at(
            update.site.place,
            "`scaler.update` runs before the step that uses these gradients: the next pass may have another scale",
        )
