from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.number_text import scale_text
from ampwise.rules.amp9xx_nan.failure_text import derivative_text, failure_finding, format_title, overflow_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP911",
    name="gradient-overflow",
    severity=Severity.ERROR,
    summary="A gradient overflows its format in the backward pass, and lowering the loss scale did not help.",
    why=(
        "FP16 gradients are limited to 65504, loss scale included. A scaler that occasionally overflows, skips and "
        "halves its scale works as intended, and is not reported. This is: gradients that are too large even at a "
        "scale of 1, or at every scale that the scaler tried. The usual cause is a sum that should be a mean, a loss "
        "multiplied by a large factor, or a steep function (a division by a small number, a power)."
    ),
    fix=(
        "Make the loss a mean, and remove large factors from it. Or train in BF16, which needs no loss scale, or keep"
        " the module in FP32."
    ),
    bad='loss = 1000 * F.mse_loss(output, target, reduction="sum")',
    good="loss = F.mse_loss(output, target)",
)


# For a format with the range of FP32.
IN_FULL = "Make the loss a mean, and remove large factors from it. Keep the input of a steep function small."


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    scale, fits, advice = scale_text(failure.scale), failure.fitting_scale, ""
    if fits is None:  # a replay runs at a scale of 1, so its numbers do too
        at = "even at a loss scale of 1" + (f" (it was {scale})" if failure.scale != 1 else "")
    else:
        at = f"at a loss scale of {scale}"
    if not origin.is_narrow:
        advice, at = IN_FULL, at if failure.scale != 1 else ""
    what = (
        f"{derivative_text(origin)} overflows in {format_title(origin.dtype)}{at and f' {at}'}{overflow_text(origin)}"
    )
    if fits is not None and fits < failure.scale:
        if fits < 1:
            what += f"; even a scale of 1 is too high: it would need {scale_text(fits)}"
        else:
            what += f"; it would fit at a scale of {scale_text(fits)}"
            engine = f'ampwise.Engine(model, optimizer, scaling={{"init_scale": {scale_text(fits)}}})'
            advice = f"Start at a loss scale that fits: `{engine}`. {advice or RULE.fix}"
    yield failure_finding(RULE, failure, what, advice=advice)
