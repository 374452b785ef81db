"""NaN made of infinities that were put there by hand."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import made_of, operation, title
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP917",
    name="cancelled-infinities",
    severity=Severity.ERROR,
    summary="Infinities that the script put there were used as numbers: inf - inf, or 0 · inf, is NaN.",
    why=(
        'An infinity that stands for "never" or "masked" is no fault as long as it is only compared, or goes '
        "through exp. Arithmetic makes NaN of it: inf - inf, inf/inf, and 0 · inf, which is also what multiplying by "
        "a mask of 0 and 1 does. In the backward pass a gradient of 0 meets the infinity in the same way."
    ),
    fix=(
        "Use a large finite number in place of the infinity (`torch.finfo(x.dtype).min`), and choose with "
        "`masked_fill` or `torch.where` instead of multiplying by a mask."
    ),
    bad='distance = points.masked_fill(~valid, float("inf"))\nloss = (distance * valid).sum()',
    good="distance = points.masked_fill(~valid, 0.0)\nloss = distance.sum()",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    if birth.by_hand:
        return f"{operation(birth)} puts {made_of(birth.made)} there, as the source has it, and it is used as a number"
    where = "in the backward pass " if birth.phase == "backward" else ""
    return (
        f"{operation(birth)} {where}makes NaN of infinities in {title(birth.dtype)} that were put there on purpose: "
        "inf - inf, inf/inf or 0 · inf"
    )
