from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding, format_title, operation_text, value_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP913",
    name="custom-op",
    severity=Severity.ERROR,
    summary="A custom operation returns NaN or inf for finite inputs.",
    why=(
        "To the tracer a custom operation is a single call, whatever it does inside: all that is known is that its "
        "inputs were finite and its outputs were not. Kernels written for FP32 often accumulate in FP16 when given "
        "FP16, and autocast does not handle them: they receive whatever the previous operation returned."
    ),
    fix=(
        "Pass it FP32: `custom_fwd(cast_inputs=torch.float32)` on its autograd.Function, or `.float()` at the call. A"
        " capsule contains the inputs of this step, for debugging."
    ),
    bad='with torch.autocast("cuda", torch.float16):\n    y = torch.ops.mine.attention(q, k, v)',
    good=(
        'with torch.autocast("cuda", torch.float16):\n    y = torch.ops.mine.attention(q.float(), k.float(), v.float())'
    ),
)

# For inputs that are already FP32.
IN_FULL = "Debug it with the inputs of this step, which a capsule contains: check its divisions, roots and logarithms."


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    given = "from infinite inputs" if origin.from_infinities else "though its inputs are finite"
    gives = f"returns {value_text(origin.made)} in {format_title(origin.dtype)} {given}"
    what = f"{operation_text(origin)}, from `{origin.op.split('.')[0]}`, {gives}; its internals cannot be traced"
    yield failure_finding(RULE, failure, what, advice="" if origin.is_narrow else IN_FULL)
