from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP656",
    name="absolute-learning-rate",
    severity=Severity.WARNING,
    summary="The function of a `LambdaLR` returns a learning rate instead of a factor.",
    why=(
        "`LambdaLR` multiplies the optimizer's learning rate by what its function returns. If that is a learning rate "
        "itself, the product is its square: 1e-6 instead of 1e-3. Nothing fails, and the model hardly learns. Judged "
        "by the values: the largest that the function returned is the learning rate that the optimizer was made with."
    ),
    fix="Return a factor of 1 at the peak, or make the optimizer with `lr=1.0`.",
    bad="LambdaLR(optimizer, lambda step: 1e-3 * min(1.0, step / warmup))",
    good="LambdaLR(optimizer, lambda step: min(1.0, step / warmup))",
)

STEPS = 20
VALUES = 3  # different ones, at least: a constant factor may be any number
SMALL = 0.1  # a learning rate above could be meant as a factor
NEAR = 0.9  # of the learning rate, as not every move is seen


def check_learning(facts: Learning) -> Findings:
    for schedule in facts.schedules:
        base, factors = schedule.base_lr, schedule.factors
        if base is None or len(factors) < VALUES or schedule.steps < STEPS or not facts.ended:
            continue
        top = max(factors)
        if NEAR * base <= top <= base * (1 + 1e-6) and base < SMALL:
            yield RULE.at(
                schedule.made_at.place,
                f"the largest factor that the function returned is {top:.3g}, and the optimizer was made with "
                f"lr={base:.3g}: the learning rate never exceeded {top * base:.3g}, its square",
                evidence={"times": schedule.moves, "lr": top * base},
            )
