from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding, overflows_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

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
        "Avoid the large intermediate result: logsumexp, log-probabilities, subtracting the maximum first. Or bound "
        "the inputs: clip gradients, lower the learning rate, normalise."
    ),
    bad="share = torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)",
    good="share = torch.softmax(x, -1)",
)


def check_op(failure: Failure) -> Findings:
    if failure.kind == RULE.name and failure.origin is not None:
        yield failure_finding(RULE, failure, overflows_text(failure.origin))
