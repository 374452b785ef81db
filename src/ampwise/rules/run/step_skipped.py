"""A skipped step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, streak_text
from ampwise.rules.evidence.guard_events import StepSkipped
from ampwise.rules.evidence.number_text import number_text, scale_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP802",
    name="step-skipped",
    severity=Severity.INFO,
    summary="A step was skipped because its loss or gradients were not finite, and the loss scale was not the cause.",
    why=(
        "A NaN in the gradients makes every weight NaN in one update, so the update is skipped, in any precision. The "
        "weights, the optimizer and the schedule are unchanged; the batch had no effect. Overflows while a scaler "
        "searches for its scale are normal and are not reported."
    ),
    fix=(
        "A single one needs no action. If it recurs, the accompanying finding (AMP9...) reports the operation or the "
        "batch it came from; without one, inspect the batch of this step."
    ),
    bad="loss.backward()\noptimizer.step()  # whatever the gradients are",
    good="engine.step(loss_fn, x, y)",
)


def check(skipped: StepSkipped) -> Iterator[Finding]:
    yield RULE.at(
        Place(step=skipped.step),
        f"the step was skipped: {_what_was_bad(skipped)}{streak_text(skipped.streak, 'bad step')}; the weights are "
        "unchanged",
        evidence=event_evidence(skipped),
    )


def _what_was_bad(skipped: StepSkipped) -> str:
    if skipped.loss is not None and not math.isfinite(skipped.loss):
        return f"its loss was {number_text(skipped.loss)}"
    loss = "" if skipped.loss is None else f", with a loss of {number_text(skipped.loss)}"
    at_scale = f" at a loss scale of {scale_text(skipped.scale)}" if skipped.scaled and skipped.scale else ""
    return f"its gradients were not finite{at_scale}{loss}"
