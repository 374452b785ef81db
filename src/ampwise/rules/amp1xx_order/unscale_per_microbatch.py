from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.accumulation import (
    events_of_each_micro_batch,
    names_one_optimizer,
)
from ampwise.check.source.names import method_called
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AccumulationWindow, SourceEvent, SourceFile
    from ampwise.watch.run_events import ScalerStep

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


def check_source(code: SourceFile) -> Findings:
    for event in events_of_each_micro_batch(code, "unscale", _is_wrong):
        yield RULE.at(event.place, "unscales on every micro-batch, but the step comes only after the last")


def _is_wrong(event: SourceEvent, window: AccumulationWindow) -> bool:
    # Only scaler.unscale_(optimizer): a manual division may be part of another scheme.
    is_call = method_called(event.node) == "unscale_" and names_one_optimizer(event)
    return is_call and not window.only_sometimes(event)


def check_event(step: ScalerStep) -> Findings:
    if step.unscaled_midway is not None:
        yield RULE.at(
            step.unscaled_midway.place,
            "gradients are unscaled here, before another scaled backward pass adds to them: "
            f"the sum of {step.backwards} passes is wrong",
            evidence={"backward_passes": step.backwards},
        )
