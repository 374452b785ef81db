"""An operation that torch did not bring, and that cannot be looked into."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import NARROW, Birth, Incident
from ampwise.evidence.incident_words import made_of, operation, title
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP913",
    name="custom-op",
    severity=Severity.ERROR,
    summary="An operation of another package, or of one's own, makes NaN or inf of finite inputs.",
    why=(
        "A custom operation is one call to the tracer, whatever it does inside: what is known is that all that went "
        "in was finite, and what came out was not. Kernels written for FP32 often sum up in FP16 when they are given "
        "FP16, and autocast does not know them: they get what the operation before has made."
    ),
    fix=(
        "Give it FP32 (`custom_fwd(cast_inputs=torch.float32)` on its autograd.Function, or `.float()` at the call), "
        "and look inside of it with the inputs of this step: a capsule has them."
    ),
    bad='with torch.autocast("cuda", torch.float16):\n    y = torch.ops.mine.attention(q, k, v)',
    good=(
        'with torch.autocast("cuda", torch.float16):\n    y = torch.ops.mine.attention(q.float(), k.float(), v.float())'
    ),
)


# Where it has FP32 already.
IN_FULL = "Look inside of it with the inputs of this step, which a capsule has: at its divisions, roots and logarithms."


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth), advice="" if incident.birth.dtype in NARROW else IN_FULL)


def _what(birth: Birth) -> str:
    given = "though all that it was given is finite" if not birth.from_infinities else "of infinities it was given"
    gives = f"gives {made_of(birth.made)} in {title(birth.dtype)} {given}"
    return f"{operation(birth)}, which `{birth.op.split('.')[0]}` brings, {gives}; what it does inside cannot be seen"
