from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding, overflows_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

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
        "smaller. To do that, normalise first, and divide before a matmul, not after."
    ),
    bad='with torch.autocast("cuda", torch.float16):\n    scores = q @ k.transpose(-2, -1) / math.sqrt(d)',
    good='with torch.autocast("cuda", torch.float16):\n    scores = (q / math.sqrt(d)) @ k.transpose(-2, -1)',
)


def check_op(failure: Failure) -> Findings:
    if failure.kind == RULE.name and failure.origin is not None:
        yield failure_finding(RULE, failure, overflows_text(failure.origin))
