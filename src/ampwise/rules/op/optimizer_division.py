"""An optimizer whose own division made the weights inf or NaN."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import NARROW, Incident, OptimizerFacts
from ampwise.evidence.incident_words import bad_values, because, listed, made_of, operation, title
from ampwise.evidence.telling_incident import told
from ampwise.evidence.wording import number
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP912",
    name="optimizer-division",
    severity=Severity.ERROR,
    summary="The optimizer's own arithmetic made the weights NaN or inf, from gradients that were finite.",
    why=(
        "Adam and its like divide by sqrt(v) + eps, in the format of the parameters. In FP16 the default eps of 1e-8 "
        "is 0, and so is v, to which a thousandth of the squared gradient is added, for gradients below 5e-3: 0/0 is "
        "NaN, and m/0 inf. The gradients were sound, so that no scaler has skipped the step; the next loss is NaN."
    ),
    fix=(
        "Keep the parameters in FP32 and compute in half under autocast (`ampwise.Engine` does); if they must be "
        "FP16, give an eps that FP16 holds and that keeps updates small: 1e-4."
    ),
    bad="model.half()\noptimizer = torch.optim.Adam(model.parameters(), lr=1e-3)",
    good="optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\nengine = ampwise.Engine(model, optimizer)",
)

OF_TORCH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name:
        facts = incident.optimizer
        reasons = listed(_reasons(facts)) if facts is not None else ""
        advice = _advice(facts) if facts is not None else ""
        yield told(RULE, incident, f"{_what(incident)}{because(reasons)}", advice=advice)


def _what(incident: Incident) -> str:
    optimizer = "the optimizer" if incident.optimizer is None else incident.optimizer.name
    if incident.source is not None:
        had = bad_values(incident.source.values)
        return f"{optimizer} left `{incident.source.name}` with {had}, from gradients that were finite"
    birth = incident.birth
    return (
        f"{optimizer}: {operation(birth)} in its step gives {made_of(birth.made)}" if birth is not None else optimizer
    )


def _reasons(facts: OptimizerFacts) -> list[str]:
    """Why it divided by 0."""
    reasons = []
    if facts.eps_becomes == 0:
        reasons.append(f"its eps of {number(facts.eps)} is 0 in {title(facts.dtype)}" if facts.eps else "its eps is 0")
    if facts.zero_denominators:
        of = f" of {facts.bad_weights:,}" if facts.bad_weights > facts.zero_denominators else ""
        reasons.append(
            f"the second moment of {facts.zero_denominators:,}{of} bad weights is 0, so that it divides by 0"
        )
    return reasons


def _advice(facts: OptimizerFacts) -> str:
    if facts.eps_becomes != 0:
        return ""
    eps = "1e-4" if facts.dtype in NARROW else "1e-8"
    plain = "Give it an eps above 0: the updates of weights that had no gradient yet are divided by it alone."
    home = "torch.optim." if facts.name in OF_TORCH else ""
    fix = RULE.fix if facts.dtype in NARROW else plain
    return f"{fix}\n    optimizer = {home}{facts.name}(model.parameters(), eps={eps})"
