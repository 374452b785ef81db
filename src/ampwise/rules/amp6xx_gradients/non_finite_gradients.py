from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.numbers.number_text import scale_text

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth, Streak

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
    consequence_of=("AMP9",),
)

FIX_WITHOUT_SCALER = (
    "If the gradients are simply too large for FP16, use a GradScaler with FP32 parameters under autocast, or train "
    "in BF16. Otherwise check the backward formula of the operation right after this parameter in the forward pass."
)
NAMED = 8


def check_gradients(health: GradientHealth) -> Findings:
    real = [streak for streak in health.real_streaks() if not streak.bad_loss and streak.gradients_alone]
    if not real:
        return
    first = real[0]
    details = health.streaks.details(first)
    parameters = details.parameters if details else ()
    # The backward pass reaches first what is last in the forward pass.
    order = {name: place for place, name in enumerate(health.names)}
    reached_first = max(parameters, key=lambda name: (order.get(name, -1), parameters.index(name)), default=None)
    which = {0: "gradients are", 1: "only this gradient is"}.get(len(parameters), f"{len(parameters)} gradients are")
    count = sum(streak.gradients_alone for streak in real)
    at = f", at {count} steps" if count > 1 else ""
    yield RULE.at(
        Place(parameter=reached_first, step=first.first),
        f"{which} not finite while the loss is{at}: {_why_real(first, health)}",
        evidence={"times": count} | ({"names": list(parameters[:NAMED])} if len(parameters) > 1 else {}),
        fix=FIX_WITHOUT_SCALER if first.lowest_scale is None and health.precision == "fp16" else None,
    )


def _why_real(streak: Streak, health: GradientHealth) -> str:
    if streak.first_scale is None or streak.lowest_scale is None:
        if streak.corrupted_from is None:
            return "no scaler skips the step"
        losses = ""
        if streak.bad_losses:
            ongoing = health.streaks.open is streak
            losses = ", nor is any later loss" if ongoing else f", nor were the losses up to step {streak.last}"
        return f"no scaler skipped the step, and the weights are not finite since step {streak.first}{losses}"
    if health.precision == "bf16":
        return "in BF16 the loss scale is not the cause"
    first, lowest = scale_text(streak.first_scale), scale_text(streak.lowest_scale)
    if streak.count > 1 and first == lowest:
        return f"{streak.count} steps in a row, at a loss scale of {first}"
    if streak.count > 1:
        return f"lowering the loss scale from {first} to {lowest} does not help"
    return f"the steps before were far from overflow at the same loss scale of {first}"
