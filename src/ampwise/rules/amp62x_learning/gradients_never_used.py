from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP624",
    name="gradients-never-used",
    severity=Severity.ERROR,
    summary="Gradients are computed again and again, and the optimizer makes no step.",
    why=(
        "Without `optimizer.step()` (or `scaler.step(optimizer)`) no weight changes. The call is missing, or stands "
        "in a branch that is never taken."
    ),
    fix="Call `optimizer.step()` after the backward pass.",
    bad="optimizer.zero_grad()\nloss.backward()",
    good="optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
)

DROPPED = 10  # times
ACCUMULATED = 256  # passes, without any zero_grad


def check_learning(facts: Learning) -> Findings:
    for use in facts.optimizers:
        dropped = sum(use.zeroed.values())
        enough = dropped >= DROPPED or (use.backwards >= ACCUMULATED and not dropped)
        if facts.ended and not use.steps and not use.by_hand and enough:
            thrown = f", and `zero_grad` dropped them {dropped} times" if dropped else ""
            yield RULE.at(
                use.made_at.place,
                f"{use.backwards} backward passes gave the parameters of {use.name} gradients{thrown}; it made no "
                "step, and no weight changed",
                evidence={"times": use.backwards},
            )
