"""A result within the range of FP32 but not of FP16."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import format_title, operation_text, overflow_text, reason_suffix, value_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP904",
    name="half-overflow",
    severity=Severity.ERROR,
    summary="A result of the forward pass exceeds the range of FP16; FP32 and BF16 can hold it.",
    why=(
        "FP16 ends at 65504: larger values become inf, and a subtraction, a softmax or a normalisation later turns it "
        "into NaN, often far from here. The loss scale is not involved: it multiplies the loss, not the activations. "
        "BF16 reaches 3.39e38, like FP32, with 8 bits of precision instead of 11."
    ),
    fix=(
        "Train in BF16 if the hardware supports it. Otherwise keep this module or line in FP32, or make its inputs "
        "smaller: normalise first, and divide before a matmul, not after."
    ),
    bad='with torch.autocast("cuda", torch.float16):\n    scores = q @ k.transpose(-2, -1) / math.sqrt(d)',
    good='with torch.autocast("cuda", torch.float16):\n    scores = (q / math.sqrt(d)) @ k.transpose(-2, -1)',
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(RULE, incident, _what(incident.birth))


def _what(birth: Origin) -> str:
    does = "overflows" if birth.made == "inf" else f"gives {value_text(birth.made)}"
    return f"{operation_text(birth)} {does} in {format_title(birth.dtype)}{reason_suffix(overflow_text(birth))}"
