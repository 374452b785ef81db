"""A division by zero."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import counted_text, format_title, operation_text, value_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP907",
    name="division-by-zero",
    severity=Severity.ERROR,
    summary="A division by zero.",
    why=(
        "x/0 is inf and 0/0 is NaN. Typical zero divisors are norms of zero vectors, standard deviations of constant "
        "inputs, and counts of masks without a single True. A guard like `+ 1e-8` has no effect in FP16, where it is "
        "0; and `torch.where` around the division hides its result but not its derivative."
    ),
    fix=(
        "Clamp the divisor, not the quotient: `clamp_min(1)` for a count, otherwise a value that the format can "
        "represent (1e-4 in FP16). Functions with a built-in guard: F.normalize, F.cosine_similarity, nn.LayerNorm."
    ),
    bad="loss = (error * mask).sum() / mask.sum()",
    good="loss = (error * mask).sum() / mask.sum().clamp_min(1)",
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(RULE, incident, _what(incident.birth))


def _what(birth: Origin) -> str:
    gives = f"{operation_text(birth)} gives {value_text(birth.made)} in {format_title(birth.dtype)}"
    if birth.family == "normalisation":
        return f"{gives}: the standard deviation or norm it divides by is 0, and no eps is added"
    if not birth.zero_divisors:
        return f"{gives}: the divisor is 0, or close to it"
    return f"{gives}: {counted_text(birth.zero_divisors, _divisors(birth), 'divisor')} 0"


def _divisors(birth: Origin) -> int | None:
    """Return the number of divisors: the divisor is the last input with that many zeros."""
    found = [each.census for each in birth.inputs if each.census and each.census.zeros == birth.zero_divisors]
    return found[-1].count if found else None
