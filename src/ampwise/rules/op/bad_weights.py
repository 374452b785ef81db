"""A parameter that was inf or NaN before the step."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, OptimizerFacts
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import bad_values_text, operation_text
from ampwise.rules.evidence.number_text import number_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP902",
    name="bad-weights",
    severity=Severity.ERROR,
    summary="A parameter was NaN or inf before the step began.",
    why=(
        "Weights that are not finite stay that way: every later loss is NaN, and no further step can repair it. They "
        "come from a checkpoint that was saved too late, from uninitialised memory (`torch.empty`), from an update "
        "that was not skipped after a bad backward pass, or from an update that was too large for the weights' "
        "format. No operation of this step is at fault."
    ),
    fix=(
        "Go back to the last checkpoint with finite weights, or fix the initialisation. `ampwise.Engine` and "
        "`ampwise.GradScaler` skip steps with bad gradients in any precision; if one of them trained the weights, the "
        "update itself was too large: lower the learning rate. Under `ampwise run`, `--every 1` finds the step that "
        "corrupted them."
    ),
    bad="self.weight = nn.Parameter(torch.empty(64, 64))",
    good="self.weight = nn.Parameter(torch.empty(64, 64))\nnn.init.xavier_uniform_(self.weight)",
)


def check(incident: Failure) -> Iterator[Finding]:
    source = incident.source
    if incident.kind != RULE.name or source is None:
        return
    whose = f" ({source.module_class})" if source.module_class else ""
    first = f"; {operation_text(source.first_use)} was the first to read it" if source.first_use is not None else ""
    yield failure_finding(
        RULE,
        incident,
        f"the parameter `{source.name}`{whose} had {bad_values_text(source.values)} before the step"
        f"{_since(incident.optimizer)}{first}",
        advice=_advice(incident.optimizer),
    )


def _since(optimizer: OptimizerFacts | None) -> str:
    if optimizer is None:
        return ""
    rate = (
        f"a learning rate of {number_text(optimizer.lr)}"
        if optimizer.has_absurd_lr and optimizer.lr is not None
        else ""
    )
    if not optimizer.steps:
        no_step = f": since the start, because {optimizer.name} has not taken a step yet"
        return f"; {optimizer.name} has {rate}" if rate else no_step
    steps = f"{optimizer.steps:,} step{'s' if optimizer.steps != 1 else ''}"
    return f", after {steps} of {optimizer.name}{f' with {rate}' if rate else ''}"


def _advice(optimizer: OptimizerFacts | None) -> str:
    if optimizer is None or not optimizer.has_absurd_lr or optimizer.lr is None:
        return ""
    return (
        f"A learning rate of {number_text(optimizer.lr)} corrupts any weights at the first update, even with healthy "
        "gradients: check where it is computed (a schedule that divides by 0?). Then go back to the last checkpoint "
        "with finite weights."
    )
