"""A step that changed nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, in_a_row
from ampwise.evidence.faults import StepSkipped
from ampwise.evidence.wording import number, scale_text
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP802",
    name="step-skipped",
    severity=Severity.INFO,
    summary="A step changed nothing: its loss or gradients were not finite, and no loss scale was the cause.",
    why=(
        "A NaN in the gradients makes every weight NaN in one update, so the update is left out, in any precision. "
        "The weights, the optimizer and the schedule are as before the step; its batch taught nothing. Overflows by "
        "which a scaler finds its scale are ordinary, and are not told."
    ),
    fix=(
        "Nothing to do for a single one. If it comes back, the finding beside this one (AMP9...) names the "
        "operation or the batch it came from; without such a finding, look at the batch of this step."
    ),
    bad="loss.backward()\noptimizer.step()  # whatever the gradients are",
    good="engine.step(loss_fn, x, y)",
)


def check(skipped: StepSkipped) -> Iterator[Finding]:
    yield RULE.at(
        Place(step=skipped.step),
        f"the step was skipped: {_what_was_bad(skipped)}{in_a_row(skipped.streak, 'bad step')}; "
        "the weights are as they were",
        evidence=evidence_of(skipped),
    )


def _what_was_bad(skipped: StepSkipped) -> str:
    if skipped.loss is not None and not math.isfinite(skipped.loss):
        return f"its loss was {number(skipped.loss)}"
    loss = "" if skipped.loss is None else f", with a loss of {number(skipped.loss)}"
    at_scale = f" at a loss scale of {scale_text(skipped.scale)}" if skipped.scaled and skipped.scale else ""
    return f"its gradients were not finite{at_scale}{loss}"
