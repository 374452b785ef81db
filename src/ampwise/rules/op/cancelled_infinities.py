"""NaN from arithmetic on infinities that the script wrote."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import format_title, operation_text, value_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP917",
    name="cancelled-infinities",
    severity=Severity.ERROR,
    summary="Infinities that the script wrote were used in arithmetic: inf - inf and 0 · inf are NaN.",
    why=(
        'An infinity that means "never" or "masked" is fine as long as it is only compared, or goes through exp. '
        "Arithmetic turns it into NaN: inf - inf, inf/inf, and 0 · inf, which is also what multiplying by a 0/1 mask "
        "does. In the backward pass, a zero gradient multiplies the infinity in the same way."
    ),
    fix=(
        "Use a large finite number instead of the infinity (`torch.finfo(x.dtype).min`), and select with "
        "`masked_fill` or `torch.where` instead of multiplying by a mask."
    ),
    bad='distance = points.masked_fill(~valid, float("inf"))\nloss = (distance * valid).sum()',
    good="distance = points.masked_fill(~valid, 0.0)\nloss = distance.sum()",
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(RULE, incident, _what(incident.birth))


def _what(birth: Origin) -> str:
    if birth.by_hand:
        return (
            f"{operation_text(birth)} writes {value_text(birth.made)}, as coded in the source, and it is then used in "
            "arithmetic"
        )
    where = "in the backward pass " if birth.phase == "backward" else ""
    return (
        f"{operation_text(birth)} {where}turns intentional infinities in {format_title(birth.dtype)} "
        f"into NaN: inf - inf, inf/inf "
        "or 0 · inf"
    )
