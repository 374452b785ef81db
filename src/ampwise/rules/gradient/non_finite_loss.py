"""A loss that is inf or NaN."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.streaks import BadStep

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP612",
    name="non-finite-loss",
    severity=Severity.ERROR,
    summary="The loss is inf or NaN.",
    why=(
        "The loss itself does not depend on the loss scale, so no scaler fixes this: something in the forward pass "
        "exceeded the range (65504 in FP16), divided by zero, or took the logarithm or root of an invalid value; or "
        "the data or the weights were already not finite."
    ),
    fix=(
        "Check the first module whose output is not finite (`ampwise run --activations` reports it), and its input; "
        "run that part in FP32 or BF16."
    ),
    bad="probability = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)",
    good="probability = torch.softmax(logits, -1)",
)

BEFORE = {
    True: "the weights were finite before",
    False: "the weights were not finite before this step",
    None: "it is unknown whether the weights were finite before",
}


def check(health: GradientHealth) -> Iterator[Finding]:
    streaks = [streak for streak in health.streaks.all if streak.bad_loss]
    if not streaks:
        return
    first = streaks[0]
    details = health.streaks.details(first)
    count = sum(streak.bad_losses for streak in streaks)
    more = f"; {count} steps in total" if count > 1 else ""
    yield RULE.at(
        Place(module=details.module if details else None, step=first.first),
        f"the loss is {first.loss}: {_known(details)}{more}",
        evidence={"times": count},
    )


def _known(details: BadStep | None) -> str:
    if details is None:
        return "its origin is unknown"
    before = BEFORE[details.healthy_before]
    if details.module:
        return f"`{details.module}` is the first module whose output is not finite, and {before}"
    if details.healthy_before is None:
        return before
    if details.healthy_before:
        return f"{before}, so it originated in this forward pass, from the data or an operation"
    return f"{before}, so the cause is in an earlier step"
