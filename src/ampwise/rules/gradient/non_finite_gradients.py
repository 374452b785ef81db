"""Gradients that are inf or NaN for a reason other than the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.number_text import scale_text
from ampwise.rules.evidence.streaks import Streak

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP613",
    name="non-finite-gradients",
    severity=Severity.ERROR,
    summary="Gradients are inf or NaN while the loss is finite, and the loss scale is not the cause.",
    why=(
        "Scaled gradients overflow now and then, and a scaler that skips the step and halves its scale works as "
        "intended: that is not reported. This is: gradients that stay bad down to a scale of 1 or through more than "
        "eight halvings, gradients that were a thousand times below the limit just before, or gradients without a "
        "scaler to skip the step. The usual cause is a backward pass that divides by zero: the root, norm or "
        "logarithm of zero, or `torch.where` over a branch that is not finite. The backward pass runs from the last "
        "layer to the first, so the last bad parameter in forward order was reached first."
    ),
    fix="Check the backward formula of the operation right after this parameter in the forward pass.",
    bad="length = (x * x).sum(-1).sqrt()",
    good="length = ((x * x).sum(-1) + 1e-6).sqrt()",
)

FIX_WITHOUT_SCALER = (
    "If the gradients are simply too large for FP16, use a GradScaler with FP32 parameters under autocast, or train "
    "in BF16. Otherwise check the backward formula of the operation right after this parameter in the forward pass."
)
NAMED = 8


def check(health: GradientHealth) -> Iterator[Finding]:
    real = [streak for streak in health.real_streaks() if not streak.bad_loss and streak.gradients_alone]
    if not real:
        return
    first = real[0]
    details = health.streaks.details(first)
    parameters = details.parameters if details else ()
    count = sum(streak.gradients_alone for streak in real)
    more = f"; {count} such steps in total" if count > 1 else ""
    yield RULE.at(
        Place(parameter=health.last_forward(parameters), step=first.first),
        f"{_what(parameters)}, {_why_real(first, health)}{more}",
        evidence={"times": count} | ({"names": list(parameters[:NAMED])} if len(parameters) > 1 else {}),
        fix=FIX_WITHOUT_SCALER if first.lowest_scale is None and health.precision == "fp16" else None,
    )


def _what(parameters: tuple[str, ...]) -> str:
    if not parameters:
        return "gradients are not finite, while the loss is"
    if len(parameters) == 1:
        return "only this gradient is not finite, while the loss is"
    return f"{len(parameters)} gradients are not finite, while the loss is; the backward pass reached this one first"


def _why_real(streak: Streak, health: GradientHealth) -> str:
    if streak.first_scale is None or streak.lowest_scale is None:
        return _without_scaler(streak, health)
    if health.precision == "bf16":
        return "which in BF16 is not caused by the loss scale"
    first, lowest = scale_text(streak.first_scale), scale_text(streak.lowest_scale)
    if streak.count > 1:
        return f"and lowering the loss scale from {first} to {lowest} does not help"
    return f"though the steps before were far from overflow at the same loss scale of {first}"


def _without_scaler(streak: Streak, health: GradientHealth) -> str:
    if streak.corrupted_from is None:
        return "and no scaler skips the step"
    without = f"and no scaler skipped the step: the weights have not been finite since step {streak.first}"
    if not streak.bad_losses:
        return without
    if health.streaks.open is streak:
        return f"{without}, nor have any later losses"
    return f"{without}, nor were the losses up to step {streak.last}"
