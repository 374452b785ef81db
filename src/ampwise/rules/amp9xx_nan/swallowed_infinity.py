from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import (
    failure_finding,
    format_title,
    operation_text,
    overflow_text,
    value_text,
)

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

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
        "Keep this module in FP32: above all normalisations, sums of squares, and means over many values. Or train in"
        " BF16, which reaches 3.39e38."
    ),
    bad="scale = x.half().square().mean(-1, keepdim=True).rsqrt()  # inf above 256, so the scale is 0",
    good="scale = x.float().square().mean(-1, keepdim=True).rsqrt()",
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    gives = f"{operation_text(origin)} gives {value_text(origin.made)} in {format_title(origin.dtype)}"
    hidden = "; later operations hide it, so no step was skipped"
    yield failure_finding(RULE, failure, f"{gives}{overflow_text(origin)}{hidden}")
