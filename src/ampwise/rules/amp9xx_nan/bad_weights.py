from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.number_text import number_text
from ampwise.rules.amp9xx_nan.failure_text import bad_source_text, failure_finding

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

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
        "Go back to the last checkpoint with finite weights, or fix the initialisation. If `ampwise.Engine` or "
        "`ampwise.GradScaler` trained them, the update itself was too large: lower the learning rate. `ampwise run "
        "--every 1` finds the step that corrupted them."
    ),
    bad="self.weight = nn.Parameter(torch.empty(64, 64))",
    good="self.weight = nn.Parameter(torch.empty(64, 64))\nnn.init.xavier_uniform_(self.weight)",
)


def check_op(failure: Failure) -> Findings:
    if failure.kind != RULE.name or failure.source is None:
        return
    since = advice = ""
    if failure.source.made_at.file:
        if failure.source.made_by.endswith("uninitialised memory"):
            since = ": it was made from uninitialised memory, and nothing has filled it"
        else:
            since = f"; {failure.source.made_by} at {failure.source.made_at.in_text}"
        advice = "Initialise it where it is made, for instance by `nn.init.normal_(parameter, std=0.02)`."
    elif (optimizer := failure.optimizer) is not None:
        rate = ""
        if optimizer.has_absurd_lr and optimizer.lr is not None:
            rate = f"learning rate of {number_text(optimizer.lr)}"
            advice = (
                f"A {rate} corrupts any weights at the first update, even with healthy gradients: check where it is "
                "computed (a schedule that divides by 0?). Then go back to the last checkpoint with finite weights."
            )
        if optimizer.steps:
            steps = f"{optimizer.steps:,} step{'s' if optimizer.steps != 1 else ''}"
            since = f", after {steps} of {optimizer.name}{f' with a {rate}' if rate else ''}"
        elif rate:
            since = f"; {optimizer.name} has a {rate}"
        else:
            since = f": since the start, because {optimizer.name} has not taken a step yet"
    yield failure_finding(RULE, failure, f"the parameter {bad_source_text(failure.source, since)}", advice=advice)
