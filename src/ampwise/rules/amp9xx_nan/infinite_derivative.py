from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import derivative_text, failure_finding, value_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP910",
    name="infinite-derivative",
    severity=Severity.ERROR,
    summary="The forward pass is finite, but a derivative is infinite at its input.",
    why=(
        "sqrt(0) is 0, but its slope there is infinite; the same holds for norms of zero vectors, powers below 1 at "
        "0, log at 0, acos and asin at 1 and -1. Multiplied by a zero gradient it becomes NaN, which is how "
        "`torch.where` fails: it passes a zero gradient to the branch not taken, and 0 · inf is NaN. A finite loss "
        "does not rule this out, and loss scaling does not help."
    ),
    fix=(
        "Keep the input away from that point: add or clamp *inside* the function, `(x.float() + 1e-6).sqrt()`. 1e-12 "
        "is 0 in FP16. Apply `torch.where` before the function as well as after it."
    ),
    bad="length = torch.where(x > 0, x.sqrt(), 0.0)",
    good="safe = torch.where(x > 0, x, 1.0)\nlength = torch.where(x > 0, safe.sqrt(), 0.0)",
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    what = f"{derivative_text(origin)} is {value_text(origin.made)}"
    if origin.hidden:
        what += f"; so was its result ({value_text(origin.hidden)}), which a later operation hides"
    else:
        what += ", though the forward pass is finite there"
    advice = ""
    if origin.derivative_of == "xlogy":  # also within kl_div, whose target may have a gradient
        advice = (
            "x · log x has no slope at x = 0. Detach x if it is only a target, or use its logarithms: `log_softmax`, "
            "and in `kl_div` `log_target=True`."
        )
    yield failure_finding(RULE, failure, what, advice=advice)
