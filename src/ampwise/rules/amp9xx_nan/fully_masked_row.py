from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import counted_text, failure_finding, operation_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP908",
    name="fully-masked-row",
    severity=Severity.ERROR,
    summary="A softmax runs over a fully masked row.",
    why=(
        "Masking scores with -inf is correct in itself: exp(-inf) is 0. But if a whole row is -inf, each weight is "
        "0/0, which is NaN. Such rows come from samples that are all padding, from a causal mask combined with left "
        "padding, and from masks of `finfo.min` that were added up and became -inf."
    ),
    fix=(
        "Leave at least one position unmasked in each row, or set fully masked rows to 0 after the softmax. Combine "
        "masks with `masked_fill` instead of adding them. Then exclude these positions from the loss."
    ),
    bad='weights = scores.masked_fill(mask, float("-inf")).softmax(-1)',
    good=(
        "all_masked = mask.all(-1, keepdim=True)\n"
        'weights = scores.masked_fill(mask & ~all_masked, float("-inf")).softmax(-1).masked_fill(all_masked, 0.0)'
    ),
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    rows = counted_text(origin.masked_rows, None, "row") if origin.masked_rows else "a row is"
    what = f"{operation_text(origin)} gives NaN: {rows} all -inf, so the softmax is 0/0"
    yield failure_finding(RULE, failure, what)
