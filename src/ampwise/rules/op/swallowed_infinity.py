"""An overflow that turned into a finite but wrong value."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import format_title, operation_text, overflow_text, reason_suffix, value_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP916",
    name="swallowed-infinity",
    severity=Severity.WARNING,
    summary="A result overflowed, and a later operation turned the infinity into a finite but wrong value.",
    why=(
        "x/inf is 0, so a variance that overflows in FP16 makes a normalised output exactly 0; a sigmoid, tanh, "
        "softmax or clamp turns an infinity into 1, 0 or its limit. The loss is finite, nothing is skipped, and the "
        "model learns from wrong values. Masks of -inf are intentional and not reported."
    ),
    fix=(
        "Keep this module in FP32 (above all normalisations, sums of squares, and means over many values), or train "
        "in BF16, which reaches 3.39e38."
    ),
    bad="scale = x.half().square().mean(-1, keepdim=True).rsqrt()  # inf above 256, so the scale is 0",
    good="scale = x.float().square().mean(-1, keepdim=True).rsqrt()",
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(RULE, incident, _what(incident.birth))


def _what(birth: Origin) -> str:
    return (
        f"{operation_text(birth)} gives {value_text(birth.made)} in "
        f"{format_title(birth.dtype)}{reason_suffix(overflow_text(birth))}; later "
        "operations hide it, so no step was skipped"
    )
