"""An optimizer whose own division made the weights inf or NaN."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import NARROW, Failure, OptimizerFacts
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import (
    bad_values_text,
    format_title,
    join_items,
    operation_text,
    reason_suffix,
    value_text,
)
from ampwise.rules.evidence.number_text import number_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP912",
    name="optimizer-division",
    severity=Severity.ERROR,
    summary="The optimizer's own arithmetic made the weights NaN or inf although the gradients were finite.",
    why=(
        "Adam and similar optimizers divide by sqrt(v) + eps, in the parameters' format. In FP16 the default eps of "
        "1e-8 is 0, and so is v, to which a thousandth of the squared gradient is added, for gradients below 5e-3: "
        "0/0 is NaN, and m/0 is inf. The gradients were fine, so no scaler skipped the step; the next loss is NaN."
    ),
    fix=(
        "Keep the parameters in FP32 and use autocast (`ampwise.Engine` does); if they must be FP16, use an eps that "
        "FP16 can represent and that keeps updates small: 1e-4."
    ),
    bad="model.half()\noptimizer = torch.optim.Adam(model.parameters(), lr=1e-3)",
    good="optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\nengine = ampwise.Engine(model, optimizer)",
)

OF_TORCH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name:
        facts = incident.optimizer
        reasons = join_items(_reasons(facts)) if facts is not None else ""
        advice = _advice(facts) if facts is not None else ""
        yield failure_finding(RULE, incident, f"{_what(incident)}{reason_suffix(reasons)}", advice=advice)


def _what(incident: Failure) -> str:
    optimizer = "the optimizer" if incident.optimizer is None else incident.optimizer.name
    if incident.source is not None:
        had = bad_values_text(incident.source.values)
        return f"{optimizer} left `{incident.source.name}` with {had} although the gradients were finite"
    birth = incident.birth
    return (
        f"{optimizer}: {operation_text(birth)} in its step gives {value_text(birth.made)}"
        if birth is not None
        else optimizer
    )


def _reasons(facts: OptimizerFacts) -> list[str]:
    """Return why it divided by 0."""
    reasons = []
    if facts.eps_becomes == 0:
        reasons.append(
            f"its eps of {number_text(facts.eps)} is 0 in {format_title(facts.dtype)}" if facts.eps else "its eps is 0"
        )
    if facts.zero_denominators:
        of = f" of {facts.bad_weights:,}" if facts.bad_weights > facts.zero_denominators else ""
        reasons.append(f"the second moment of {facts.zero_denominators:,}{of} bad weights is 0, so it divides by 0")
    return reasons


def _advice(facts: OptimizerFacts) -> str:
    if facts.eps_becomes != 0:
        return ""
    eps = "1e-4" if facts.dtype in NARROW else "1e-8"
    plain = "Use an eps above 0: for weights that have had no gradient yet, it is the whole divisor."
    prefix = "torch.optim." if facts.name in OF_TORCH else ""
    fix = RULE.fix if facts.dtype in NARROW else plain
    return f"{fix}\n    optimizer = {prefix}{facts.name}(model.parameters(), eps={eps})"
