"""What to do about a loss or gradients that are not finite, once more is known of where that began."""

from __future__ import annotations

from collections.abc import Iterable

from ampwise.finding import Finding, Severity
from ampwise.record.rows import Seen
from ampwise.rules.gradient import non_finite_gradients, non_finite_loss

__all__ = ["is_cause", "point_to_cause"]

SYMPTOMS = (non_finite_loss.RULE.code, non_finite_gradients.RULE.code)
SEE_OPERATION = "See the finding about the operation."
AFTER_MODEL = (
    "The model's own part is finite: it arose between its output and the loss. Put that into a function, and ask "
    "`ampwise.trace(loss_fn, x, y)`."
)


def is_cause(finding: Finding) -> bool:
    """It says where something went bad, and not that this could not be found."""
    return finding.rule.names_the_cause and finding.severity is Severity.ERROR


def point_to_cause(found: Iterable[Seen], *, known: bool, after_model: bool = False) -> bool:
    """Give the symptoms among the findings better advice than to search; whether there was any to be given.

    known: a finding names the cause. after_model: a replay has shown the models themselves to be finite.
    """
    fix = SEE_OPERATION if known else AFTER_MODEL if after_model else ""
    symptoms = [seen for seen in found if fix and seen.finding.rule.code in SYMPTOMS]
    for seen in symptoms:
        seen.finding = seen.finding.but(fix=fix)
    return bool(symptoms)
