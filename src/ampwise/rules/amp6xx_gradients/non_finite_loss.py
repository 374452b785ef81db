from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

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
    fix=("Check the first module whose output is not finite, and its input; `ampwise run --activations` names it."),
    bad="probability = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)",
    good="probability = torch.softmax(logits, -1)",
    consequence_of=("AMP9",),
)

IN_FP16 = f"{RULE.fix} Run that part in FP32 or BF16."
BEFORE = {
    True: "the weights were finite, so the data or an operation of this step is the cause",
    False: "the weights were not finite before this step, so the cause is an earlier update, or the initialisation",
    None: "whether the weights were finite before is unknown",
}


def check_gradients(health: GradientHealth) -> Findings:
    streaks = [streak for streak in health.streaks.all if streak.bad_loss]
    if not streaks:
        return
    first = streaks[0]
    details = health.streaks.details(first)
    known = "its origin is unknown" if details is None else BEFORE[details.healthy_before]
    if details is not None and details.module:
        known = f"`{details.module}` is the first module whose output is not finite"
        known += "" if details.healthy_before else f", and {BEFORE[details.healthy_before].partition(',')[0]}"
    count = sum(streak.bad_losses for streak in streaks)
    at = f" at {count} steps" if count > 1 else ""
    place = Place(module=details.module if details else None, step=first.first)
    fix = IN_FP16 if health.precision == "fp16" else None
    yield RULE.at(place, f"the loss is {first.loss}{at}: {known}", evidence={"times": count}, fix=fix)
