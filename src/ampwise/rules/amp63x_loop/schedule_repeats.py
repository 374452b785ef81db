from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP635",
    name="schedule-repeats",
    severity=Severity.WARNING,
    summary="A cosine schedule runs on after its end, and the learning rate rises again.",
    why=(
        "After `T_max` steps `CosineAnnealingLR` does not stay at its minimum: the learning rate goes up to its first "
        "value in the next `T_max` steps, and down again. Stepped once per batch with `T_max` in epochs it oscillates "
        "from the first epoch on. For restarts on purpose there is `CosineAnnealingWarmRestarts`."
    ),
    fix="Step it once per epoch, or set `T_max` to all steps of the run.",
    bad=(
        "scheduler = CosineAnnealingLR(optimizer, T_max=epochs)\nfor x, y in loader:\n    train_step(x, y)\n    "
        "scheduler.step()"
    ),
    good=(
        "scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))\nfor x, y in loader:\n    train_step(x, "
        "y)\n    scheduler.step()"
    ),
)

PERIODS = 4  # of T_max steps: half of them upwards
PER_BATCH = 0.9  # moves for each optimizer step
STEPS = 20


def check_learning(facts: Learning) -> Findings:
    for schedule in facts.schedules:
        period = schedule.period
        if not facts.ended or not isinstance(period, int) or schedule.name != "CosineAnnealingLR" or schedule.inner:
            continue
        per_batch = schedule.moves >= PER_BATCH * schedule.steps
        if per_batch and schedule.position >= PERIODS * period and schedule.steps >= STEPS:
            yield RULE.at(
                schedule.step_site.place,
                f"{schedule.name} with T_max={period} was stepped {schedule.position} times, once per optimizer step: "
                f"the learning rate rose again {(schedule.position // period + 1) // 2} times",
                evidence={"times": schedule.position, "period": period},
            )
