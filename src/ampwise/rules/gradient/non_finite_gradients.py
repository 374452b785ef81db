"""Gradients that are inf or NaN for another reason than the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.health import Health
from ampwise.evidence.streaks import Streak
from ampwise.evidence.wording import scale_text
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP613",
    name="non-finite-gradients",
    severity=Severity.ERROR,
    summary="Gradients are inf or NaN while the loss is finite, and it is not the loss scale's doing.",
    why=(
        "Scaled gradients overflow now and then, and a scaler that skips the step and halves its scale is doing its "
        "work: that is not reported. This is: gradients that stay bad down to a scale of 1 or through more than "
        "eight halvings, that were a thousand times below the limit just before, or that have no scaler at all to "
        "skip the step. The usual cause is a backward pass that divides by zero: the root, norm or logarithm of "
        "zero, or `torch.where` over a branch that is not finite. The backward pass runs from the last layer to the "
        "first, so the bad parameter that is last in the forward pass was reached first."
    ),
    fix="Look at what comes right after this parameter in the forward pass, in its backward formula.",
    bad="length = (x * x).sum(-1).sqrt()",
    good="length = ((x * x).sum(-1) + 1e-6).sqrt()",
)

FIX_WITHOUT_SCALER = (
    "If the gradients are just too large for FP16: use a GradScaler with FP32 parameters, under autocast, or train in "
    "BF16. If not, look at what comes right after this parameter in the forward pass, in its backward formula."
)
NAMED = 8


def check(health: Health) -> Iterator[Finding]:
    real = [streak for streak in health.real_streaks() if not streak.bad_loss and streak.gradients_alone]
    if not real:
        return
    first = real[0]
    details = health.streaks.details(first)
    parameters = details.parameters if details else ()
    count = sum(streak.gradients_alone for streak in real)
    more = f"; {count} such steps in all" if count > 1 else ""
    yield RULE.at(
        Place(parameter=health.last_forward(parameters), step=first.first),
        f"{_what(parameters)}, {_why_real(first, health)}{more}",
        evidence={"times": count} | ({"names": list(parameters[:NAMED])} if len(parameters) > 1 else {}),
        fix=FIX_WITHOUT_SCALER if first.lowest_scale is None and health.precision == "fp16" else None,
    )


def _what(parameters: tuple[str, ...]) -> str:
    if not parameters:
        return "gradients are not finite while the loss is"
    if len(parameters) == 1:
        return "this gradient alone is not finite while the loss is"
    return f"{len(parameters)} gradients are not finite while the loss is; the backward pass reached this one first"


def _why_real(streak: Streak, health: Health) -> str:
    if streak.first_scale is None or streak.lowest_scale is None:
        return _without_scaler(streak, health)
    if health.precision == "bf16":
        return "which in BF16 is not the loss scale's doing"
    first, lowest = scale_text(streak.first_scale), scale_text(streak.lowest_scale)
    if streak.count > 1:
        return f"and a loss scale lowered from {first} to {lowest} does not help"
    return f"though the steps before were far from overflow at the same loss scale of {first}"


def _without_scaler(streak: Streak, health: Health) -> str:
    if streak.spoiled_from is None:
        return "and no scaler skips the step"
    spoiled = f"and no scaler skipped the step: the weights are not finite since step {streak.first}"
    if not streak.bad_losses:
        return spoiled
    if health.streaks.open is streak:
        return f"{spoiled}, and all later losses with them"
    return f"{spoiled}, and the losses up to step {streak.last} with them"
