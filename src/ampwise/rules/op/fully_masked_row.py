"""A softmax over nothing but -inf."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import counted, operation
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP908",
    name="fully-masked-row",
    severity=Severity.ERROR,
    summary="A softmax over a row that is masked throughout: there is nothing to share out.",
    why=(
        "Masking scores with -inf is right, and no fault by itself: exp(-inf) is 0. But where a whole row is -inf, "
        "each share is 0/0, which is NaN. Rows like that come from samples that are all padding, from a causal mask "
        "joined with padding on the left, and from masks of `finfo.min` that were added up and became -inf."
    ),
    fix=(
        "Let each row have something to look at, or set the rows without to 0 after the softmax. Choose "
        "between masks (`masked_fill`) instead of adding them up. Then leave these positions out of the loss."
    ),
    bad='weights = scores.masked_fill(mask, float("-inf")).softmax(-1)',
    good=(
        "nothing_left = mask.all(-1, keepdim=True)\n"
        'weights = scores.masked_fill(mask & ~nothing_left, float("-inf")).softmax(-1).masked_fill(nothing_left, 0.0)'
    ),
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    rows = counted(birth.masked_rows, None, "row") if birth.masked_rows else "a row is"
    return f"{operation(birth)} gives NaN: {rows} -inf throughout, and with nothing to share out it is 0/0"
