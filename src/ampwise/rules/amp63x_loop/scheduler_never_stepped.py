from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP633",
    name="scheduler-never-stepped",
    severity=Severity.WARNING,
    summary="A learning rate scheduler is made, and its `step` is never called.",
    why=(
        "The learning rate stays where the scheduler's constructor has put it: of a warm-up that is its lowest value. "
        "Judged at the end of the script; a scheduler that is part of another one does not count."
    ),
    fix="Call `scheduler.step()` after each optimizer step, or after each epoch, as its arguments are meant.",
    bad="scheduler = CosineAnnealingLR(optimizer, T_max=steps)\nfor x, y in loader:\n    train_step(x, y)",
    good=(
        "scheduler = CosineAnnealingLR(optimizer, T_max=steps)\nfor x, y in loader:\n    train_step(x, y)\n    "
        "scheduler.step()"
    ),
    consequence_of=("AMP625",),
)

STEPS = 50


def check_learning(facts: Learning) -> Findings:
    moved = {each.optimizer for each in facts.schedules if each.moves}
    for schedule in facts.schedules:
        is_idle = not schedule.moves and not schedule.inner and schedule.optimizer not in moved
        if facts.ended and is_idle and schedule.steps >= STEPS:
            lr = next((use.lr for use in facts.optimizers if use.index == schedule.optimizer), None)
            stays = "" if lr is None else f": the learning rate stayed at {lr:.3g}"
            yield RULE.at(
                schedule.made_at.place,
                f"{schedule.name} was not stepped in a run with {schedule.steps} steps of its optimizer{stays}",
                evidence={"steps": schedule.steps},
            )
