"""A parameter that was inf or NaN before the step."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Incident, OptimizerFacts
from ampwise.evidence.incident_words import bad_values, operation
from ampwise.evidence.telling_incident import told
from ampwise.evidence.wording import number
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP902",
    name="bad-weights",
    severity=Severity.ERROR,
    summary="A parameter was NaN or inf before the step began.",
    why=(
        "Weights that are not finite stay so: each later loss is NaN, and no step of this run can mend it. They come "
        "from a checkpoint that was saved too late, from an initialisation that left memory as it was "
        "(`torch.empty`), from an update that nobody skipped after a bad backward pass, or from an update that was "
        "too large for the format of the weights. No operation of this step is guilty."
    ),
    fix=(
        "Go back to the last checkpoint whose weights are finite, or mend the initialisation. `ampwise.Engine` and "
        "`ampwise.GradScaler` skip steps whose gradients are bad, in any precision; if one of them has trained the "
        "weights, the update itself was too large: lower the learning rate. Under `ampwise run`, `--every 1` finds "
        "the step that spoiled them."
    ),
    bad="self.weight = nn.Parameter(torch.empty(64, 64))",
    good="self.weight = nn.Parameter(torch.empty(64, 64))\nnn.init.xavier_uniform_(self.weight)",
)


def check(incident: Incident) -> Iterator[Finding]:
    source = incident.source
    if incident.kind != RULE.name or source is None:
        return
    whose = f" ({source.module_class})" if source.module_class else ""
    first = f"; {operation(source.first_use)} read it first" if source.first_use is not None else ""
    yield told(
        RULE,
        incident,
        f"the parameter `{source.name}`{whose} had {bad_values(source.values)} before the step"
        f"{_since(incident.optimizer)}{first}",
        advice=_advice(incident.optimizer),
    )


def _since(optimizer: OptimizerFacts | None) -> str:
    if optimizer is None:
        return ""
    rate = f"a learning rate of {number(optimizer.lr)}" if optimizer.has_absurd_lr and optimizer.lr is not None else ""
    if not optimizer.steps:
        no_step = f": from the start, for {optimizer.name} has taken no step yet"
        return f"; {optimizer.name} has {rate}" if rate else no_step
    steps = f"{optimizer.steps:,} step{'s' if optimizer.steps != 1 else ''}"
    return f", after {steps} of {optimizer.name}{f' with {rate}' if rate else ''}"


def _advice(optimizer: OptimizerFacts | None) -> str:
    if optimizer is None or not optimizer.has_absurd_lr or optimizer.lr is None:
        return ""
    return (
        f"A learning rate of {number(optimizer.lr)} spoils any weights at its first update, however sound the "
        "gradients are: look where it is computed (a schedule that divides by 0?). Then go back to the last "
        "checkpoint whose weights are finite."
    )
