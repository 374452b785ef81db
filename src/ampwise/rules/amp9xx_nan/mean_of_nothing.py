from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding, operation_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP909",
    name="mean-of-nothing",
    severity=Severity.ERROR,
    summary="A mean was taken over no values, or a standard deviation over one.",
    why=(
        "The mean of nothing is 0/0, which is NaN. It happens when a mask or filter removes everything from a batch, "
        "when all labels are `ignore_index` (cross entropy averages over the others), and for the standard deviation "
        "of one value, which torch divides by n - 1 = 0. Only rare batches cause it, so it shows up late."
    ),
    fix="Divide the sum by the count, clamped to at least 1, or skip batches with nothing to learn from.",
    bad="loss = F.cross_entropy(logits, labels)  # all labels are -100",
    good=(
        'total = F.cross_entropy(logits, labels, reduction="sum")\nloss = total / (labels != -100).sum().clamp_min(1)'
    ),
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    empty = any(0 in each.shape for each in origin.inputs)
    if origin.name.startswith("nll_loss") and not empty:
        why = "all labels are `ignore_index` or have weight 0, and the mean of nothing is 0/0"
    elif origin.name.startswith(("var", "std")) and not empty:
        why = "there is at most one value, and it divides by n - 1"
    else:
        why = "there are no values, and 0/0 is NaN"
    yield failure_finding(RULE, failure, f"{operation_text(origin)} gives NaN: {why}")
