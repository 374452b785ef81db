"""A result that exceeds FP32's range, or is not finite in any format."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import format_title, operation_text, overflow_text, reason_suffix, value_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP905",
    name="overflow",
    severity=Severity.ERROR,
    summary="A result of the forward pass overflows, and would in FP32 too.",
    why=(
        "FP32 and BF16 end near 3.4e38, which exp reaches at 88.7. A larger result is not a mixed-precision problem: "
        "weights or activations have grown without bound, or a formula has an intermediate result (a power, an "
        "exponential, a long product) far larger than its final one."
    ),
    fix=(
        "Rewrite the formula to avoid the large intermediate result (logsumexp, log-probabilities, subtracting the "
        "maximum first), or bound the inputs: clip gradients, lower the learning rate, normalise."
    ),
    bad="share = torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)",
    good="share = torch.softmax(x, -1)",
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(RULE, incident, _what(incident.birth))


def _what(birth: Origin) -> str:
    does = "overflows" if birth.made == "inf" else f"gives {value_text(birth.made)}"
    return f"{operation_text(birth)} {does} in {format_title(birth.dtype)}{reason_suffix(overflow_text(birth))}"
