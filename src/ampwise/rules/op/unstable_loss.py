"""A custom loss that takes exp of a large number or log of zero."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import (
    domain_text,
    format_title,
    operation_text,
    overflow_text,
    reason_suffix,
    result_text,
)

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP918",
    name="unstable-loss",
    severity=Severity.ERROR,
    summary="A custom loss takes exp of a large number, or log of zero.",
    why=(
        "exp overflows FP16 at 11.1 and FP32 at 88.7, and the logarithm of a probability that rounded to 0 is -inf. "
        "The loss as a whole is harmless: the exponential and the logarithm cancel when computed together. torch's "
        "own functions do that, and autocast runs them in FP32; custom code gets neither."
    ),
    fix=(
        "Use the function that combines both, on the logits and not on probabilities: F.cross_entropy, "
        "F.binary_cross_entropy_with_logits, log_softmax, logsumexp, logsigmoid, F.softplus."
    ),
    bad="loss = -torch.log(torch.softmax(logits, -1)[rows, labels] + 1e-8).mean()",
    good="loss = F.cross_entropy(logits, labels)",
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(RULE, incident, _what(incident.birth))


def _what(birth: Origin) -> str:
    if birth.name.endswith("ctc_loss"):
        return (
            f"{operation_text(birth)} gives {result_text(birth)}: a target is longer than its input "
            f"(repeats need one more), "
            "so no alignment is possible; drop it, or set `zero_infinity=True`"
        )
    gives = f"in the loss, {operation_text(birth)} gives {result_text(birth)} in {format_title(birth.dtype)}"
    return f"{gives}{reason_suffix(domain_text(birth) if birth.outside_domain else overflow_text(birth))}"
