"""A logarithm, root or arc function of what it is not defined for."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import operation, outside, result_of, title
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP906",
    name="outside-domain",
    severity=Severity.ERROR,
    summary="A logarithm, root, power or arc function was given a number it has no finite value for.",
    why=(
        "log(0) is -inf; log and sqrt of a negative number are NaN. Often the number is right in exact "
        "arithmetic and rounding put it over the edge: a variance computed as a difference is -1e-7, a cosine is "
        "1.0000001, a probability rounds to 0. A guard like `+ 1e-8` is no guard in FP16, where everything up to 3e-8 "
        "is 0."
    ),
    fix=(
        "Keep the argument away from the edge with `clamp`, by an amount that the format holds (1e-4 in FP16), or "
        "use the function made for it: log_softmax, logsigmoid, F.gaussian_nll_loss."
    ),
    bad="std = (x.square().mean() - x.mean().square()).sqrt()",
    good="std = x.var(correction=0).clamp_min(1e-12).sqrt()",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    return f"{operation(birth)} gives {result_of(birth)} in {title(birth.dtype)}: {outside(birth)}"
