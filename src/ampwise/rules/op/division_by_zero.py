"""A division by zero."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import counted, made_of, operation, title
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP907",
    name="division-by-zero",
    severity=Severity.ERROR,
    summary="Something was divided by zero.",
    why=(
        "x/0 is inf and 0/0 is NaN. Divisors that come to 0 are norms of zero vectors, standard deviations of "
        "constant inputs, and counts of masks without a single True. A guard like `+ 1e-8` does nothing in FP16, "
        "where it is 0; and `torch.where` around the division hides its result but not its derivative."
    ),
    fix=(
        "Clamp the divisor, not the quotient: `clamp_min(1)` where it counts something, else a number that the format "
        "holds (1e-4 in FP16). Functions that have the guard: F.normalize, F.cosine_similarity, nn.LayerNorm."
    ),
    bad="loss = (error * mask).sum() / mask.sum()",
    good="loss = (error * mask).sum() / mask.sum().clamp_min(1)",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    gives = f"{operation(birth)} gives {made_of(birth.made)} in {title(birth.dtype)}"
    if birth.family == "normalisation":
        return f"{gives}: what it divides by, a spread or a length, is 0, and nothing is added to it (eps)"
    if not birth.zero_divisors:
        return f"{gives}: the divisor is 0, or next to it"
    return f"{gives}: {counted(birth.zero_divisors, _divisors(birth), 'divisor')} 0"


def _divisors(birth: Birth) -> int | None:
    """How many there are: the divisor is the last input with so many zeros."""
    found = [each.census for each in birth.inputs if each.census and each.census.zeros == birth.zero_divisors]
    return found[-1].count if found else None
