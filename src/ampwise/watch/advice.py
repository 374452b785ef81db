"""Advice on a non-finite loss or gradients, once the cause is known."""

from __future__ import annotations

from collections.abc import Iterable

from ampwise.finding import Finding, Severity
from ampwise.rules.amp6xx_gradients import non_finite_gradients, non_finite_loss
from ampwise.runs.rows import CountedFinding

__all__ = ["is_cause", "point_to_cause"]

SYMPTOMS = (non_finite_loss.RULE.code, non_finite_gradients.RULE.code)
SEE_OPERATION = "See the finding about the operation."
AFTER_MODEL = (
    "The model's output is finite: the bad value arises between it and the loss. Put that code into a function and run "
    "`ampwise.trace(loss_fn, x, y)`."
)


def is_cause(finding: Finding) -> bool:
    """Whether the finding names the cause of a bad value, and does not just say that none was found."""
    return finding.rule.names_the_cause and finding.severity is Severity.ERROR


def point_to_cause(found: Iterable[CountedFinding], *, known: bool, after_model: bool = False) -> bool:
    """Give symptoms among the findings a more specific fix. Return whether any was changed.

    known: a finding names the cause. after_model: a replay has shown that the models' outputs are finite.
    """
    fix = SEE_OPERATION if known else AFTER_MODEL if after_model else ""
    symptoms = [seen for seen in found if fix and seen.finding.rule.code in SYMPTOMS]
    for seen in symptoms:
        seen.finding = seen.finding.but(fix=fix)
    return bool(symptoms)
