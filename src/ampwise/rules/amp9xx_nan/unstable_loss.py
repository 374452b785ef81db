from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import (
    domain_text,
    failure_finding,
    gives_text,
    operation_text,
    overflow_text,
)

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP918",
    name="unstable-loss",
    severity=Severity.ERROR,
    summary="A loss takes exp of a large number, or log of 0 or less, or a CTC target does not fit its input.",
    why=(
        "exp overflows FP16 at 11.1 and FP32 at 88.7, and the logarithm of a probability that rounded to 0 is -inf. "
        "The loss as a whole is harmless: the exponential and the logarithm cancel when computed together. torch's "
        "own functions do that, and autocast runs them in FP32; custom code gets neither. A CTC loss is -log of the "
        "probability of all alignments, and there is none of a target that is longer than its input."
    ),
    fix=(
        "Use the function that combines both, on logits: F.cross_entropy, F.binary_cross_entropy_with_logits, "
        "log_softmax. Others are logsumexp, logsigmoid and F.softplus."
    ),
    bad="loss = -torch.log(torch.softmax(logits, -1)[rows, labels] + 1e-8).mean()",
    good="loss = F.cross_entropy(logits, labels)",
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    if origin.name.endswith("ctc_loss") and origin.made == "inf":
        what = (
            f"{operation_text(origin)} gives inf: a target is longer than its input (a repeated label needs one step "
            "more)"
        )
        advice = (
            "Set `zero_infinity=True`, or leave out samples whose target, with its repeats, is longer than the input."
        )
    else:
        reason = f": {domain_text(origin)}" if origin.outside_domain else overflow_text(origin)
        what, advice = f"in the loss, {gives_text(origin)}{reason}", ""
    yield failure_finding(RULE, failure, what, advice=advice)
