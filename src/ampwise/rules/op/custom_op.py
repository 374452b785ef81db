"""A custom operation, whose internals cannot be traced."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import NARROW, Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import format_title, operation_text, value_text

__all__ = ["RULE", "check"]

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
        "Pass it FP32 (`custom_fwd(cast_inputs=torch.float32)` on its autograd.Function, or `.float()` at the call), "
        "and debug it with the inputs of this step, which a capsule contains."
    ),
    bad='with torch.autocast("cuda", torch.float16):\n    y = torch.ops.mine.attention(q, k, v)',
    good=(
        'with torch.autocast("cuda", torch.float16):\n    y = torch.ops.mine.attention(q.float(), k.float(), v.float())'
    ),
)


# For inputs that are already FP32.
IN_FULL = "Debug it with the inputs of this step, which a capsule contains: check its divisions, roots and logarithms."


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(
            RULE, incident, _what(incident.birth), advice="" if incident.birth.dtype in NARROW else IN_FULL
        )


def _what(birth: Origin) -> str:
    given = "though its inputs are finite" if not birth.from_infinities else "from infinite inputs"
    gives = f"returns {value_text(birth.made)} in {format_title(birth.dtype)} {given}"
    return f"{operation_text(birth)}, from `{birth.op.split('.')[0]}`, {gives}; its internals cannot be traced"
