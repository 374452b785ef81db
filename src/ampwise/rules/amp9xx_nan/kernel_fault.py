from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.number_text import number_text
from ampwise.rules.amp9xx_nan.failure_text import failure_finding, format_title, operation_text, value_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP919",
    name="kernel-fault",
    severity=Severity.ERROR,
    summary="A kernel of torch or its libraries returns NaN or inf where another one for the same operation does not.",
    why=(
        "Attention, convolutions and matmuls have several kernels, chosen by shape, format and GPU, and some of them "
        "have bugs. Here the inputs of the operation are finite, and the same step is finite with another kernel in "
        "the same precision: clamping inputs, lowering the learning rate or changing the model would only hide it."
    ),
    fix="Switch the kernel off until its library is fixed, and report it with the shapes, the versions and the GPU.",
    bad="out = F.scaled_dot_product_attention(q, k, v, mask)  # cuDNN's kernel: NaN in the gradient of q",
    good="torch.backends.cuda.enable_cudnn_sdp(False)\nout = F.scaled_dot_product_attention(q, k, v, mask)",
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    gives = f"returns {value_text(origin.made)} in {format_title(origin.dtype)} for finite inputs"
    what = f"{operation_text(origin)} {gives}: the kernel is at fault, not the model"
    if origin.exact == "finite" and origin.exact_largest is not None:
        what += f"; in FP64 the result is no larger than {number_text(origin.exact_largest)}"
    links = [trial.argument for trial in failure.trials if trial.change == "kernel" and trial.argument]
    if links:
        what += f"; this is a known bug, {links[0]}"
    yield failure_finding(RULE, failure, what)
