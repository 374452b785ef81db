from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP633",
    name="scheduler-never-stepped",
    severity=Severity.WARNING,
    summary="A learning rate scheduler is never stepped, too seldom, or for another optimizer.",
    why=(
        "The learning rate stays where the scheduler's constructor has put it: of a warm-up that is its lowest value. "
        "Judged at the end of the script; a scheduler that is part of another one does not count. One made for "
        "as many steps as the optimizer makes, and is stepped once an epoch, stays in the warm-up; one of an optimizer "
        "that was replaced changes nothing."
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
MOVES = 2  # between which another optimizer made steps
RARELY = 2  # steps for each move, at least


def check_learning(facts: Learning) -> Findings:
    moved = {each.optimizer for each in facts.schedules if each.moves}
    for schedule in facts.schedules:
        if not facts.ended or schedule.inner:
            continue
        is_idle = not schedule.moves and schedule.optimizer not in moved
        lr = next((use.lr for use in facts.optimizers if use.index == schedule.optimizer), None)
        stays = "" if lr is None else f": the learning rate stayed at {lr:.3g}"
        if is_idle and schedule.steps >= STEPS:
            yield RULE.at(
                schedule.made_at.place,
                f"{schedule.name} was not stepped in a run with {schedule.steps} steps of its optimizer{stays}",
                evidence={"steps": schedule.steps},
            )
        elif schedule.idle_moves >= MOVES and not schedule.steps and schedule.other is not None:
            yield RULE.at(
                schedule.made_at.place,
                f"{schedule.name} was made for an optimizer that made no step, and another one "
                f"({schedule.other.short}) steps the same parameters at a learning rate that never changes",
                fix="Make the scheduler with the optimizer that makes the steps, and after it.",
                evidence={"times": schedule.moves},
            )
        elif (
            schedule.total is not None
            and schedule.total == schedule.steps >= STEPS
            and 0 < schedule.moves * RARELY <= schedule.total
        ):
            yield RULE.at(
                schedule.step_site.place,
                f"{schedule.name} was made for {schedule.total} steps, as many as its optimizer made, and was stepped "
                f"{schedule.moves} times only: it ended at {schedule.moves / schedule.total:.0%} of the schedule",
                fix="Step it after each step of the optimizer, or count epochs in its arguments.",
                evidence={"steps": schedule.steps, "times": schedule.moves},
            )
