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
    summary="Gradients are inf or NaN while the loss is finite, and a lower loss scale does not help.",
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


def check(health: Health) -> Iterator[Finding]:
    real = [streak for streak in health.real_streaks() if not streak.bad_loss]
    if not real:
        return
    first = real[0]
    details = health.streaks.details(first)
    parameters = details.parameters if details else ()
    count = sum(streak.count for streak in real)
    times = f"; {count} such steps in all" if count > 1 else ""
    yield RULE.at(
        Place(parameter=health.last_forward(parameters), step=first.first),
        f"{_what(parameters)}, {_why_real(first, health.precision)}{times}",
        evidence={
            "steps": count,
            "parameters": len(parameters) or None,
            "first_scale": first.first_scale,
            "lowest_scale": first.lowest_scale,
        },
    )


def _what(parameters: tuple[str, ...]) -> str:
    if not parameters:
        return "gradients are not finite while the loss is"
    if len(parameters) == 1:
        return "this gradient alone is not finite while the loss is"
    return f"{len(parameters)} gradients are not finite while the loss is; the backward pass reached this one first"


def _why_real(streak: Streak, precision: str) -> str:
    if streak.first_scale is None or streak.lowest_scale is None:
        return "and no scaler skips the step"
    if precision == "bf16":
        return "which in BF16 is not the loss scale's doing"
    first, lowest = scale_text(streak.first_scale), scale_text(streak.lowest_scale)
    if streak.count > 1:
        return f"and a loss scale lowered from {first} to {lowest} does not help"
    return f"though the steps before were far from overflow at the same loss scale of {first}"
