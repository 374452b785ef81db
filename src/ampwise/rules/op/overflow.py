"""A result beyond FP32's range, or one that is not finite in any format."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import because, how_far, made_of, operation, title
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP905",
    name="overflow",
    severity=Severity.ERROR,
    summary="A result of the forward pass overflows, and FP32 would not hold it either.",
    why=(
        "FP32 and BF16 end near 3.4e38, and exp reaches that at 88.7. A result that is larger is no matter of mixed "
        "precision: weights or activations have grown without bound, or a formula has an intermediate result (a "
        "power, an exponential, a product of many) far larger than its outcome."
    ),
    fix=(
        "Write the formula so that the large intermediate result does not occur (logsumexp, log-probabilities, the "
        "maximum subtracted first), or bound what goes in: clip gradients, lower the learning rate, normalise."
    ),
    bad="share = torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)",
    good="share = torch.softmax(x, -1)",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    does = "overflows" if birth.made == "inf" else f"gives {made_of(birth.made)}"
    return f"{operation(birth)} {does} in {title(birth.dtype)}{because(how_far(birth))}"
