from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding, format_title, operation_text, value_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP917",
    name="cancelled-infinities",
    severity=Severity.ERROR,
    summary="Infinities that the script wrote were used in arithmetic: inf - inf and 0 · inf are NaN.",
    why=(
        'An infinity that means "never" or "masked" is fine as long as it is only compared, or goes through exp. '
        "Arithmetic turns it into NaN: inf - inf, inf/inf, and 0 · inf, which is also what multiplying by a 0/1 mask "
        "does. In the backward pass, a zero gradient multiplies the infinity in the same way."
    ),
    fix=(
        "Use a large finite number, `torch.finfo(x.dtype).min`, instead of the infinity. Select with `masked_fill` or"
        " `torch.where` instead of multiplying by a mask."
    ),
    bad='distance = points.masked_fill(~valid, float("inf"))\nloss = (distance * valid).sum()',
    good="distance = points.masked_fill(~valid, 0.0)\nloss = distance.sum()",
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    if origin.by_hand:
        what = f"writes {value_text(origin.made)}, as coded in the source, and it is then used in arithmetic"
    else:
        where = "in the backward pass " if origin.phase == "backward" else ""
        infinities = f"intentional infinities in {format_title(origin.dtype)}"
        what = f"{where}turns {infinities} into NaN: inf - inf, inf/inf or 0 · inf"
    yield failure_finding(RULE, failure, f"{operation_text(origin)} {what}")
