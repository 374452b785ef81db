from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.finding.call_site import CallSite
    from ampwise.watch.learning import Learning, ScheduleUse

RULE = Rule(
    code="AMP634",
    name="learning-rate-vanished",
    severity=Severity.WARNING,
    summary="The learning rate falls to next to nothing early in the run.",
    why=(
        "Usual causes: a schedule that was made for epochs is stepped once per batch, or its number of steps is too "
        "small (without the factor for the epochs, or for accumulation). The rest of the run changes nothing."
    ),
    fix="Step a schedule of epochs once per epoch, or count all optimizer steps of the run in its arguments.",
    bad=(
        "scheduler = ExponentialLR(optimizer, gamma=0.9)\nfor x, y in loader:\n    train_step(x, y)\n    "
        "scheduler.step()"
    ),
    good=(
        "scheduler = ExponentialLR(optimizer, gamma=0.9)\nfor epoch in range(epochs):\n    train_epoch(loader)\n    "
        "scheduler.step()"
    ),
)

STEPS = 20
SHARE = 0.25  # of the run
OFTEN = 1.5  # moves per step of the optimizer
OF_EPOCHS = ("ExponentialLR", "StepLR", "MultiStepLR", "MultiplicativeLR", "ReduceLROnPlateau")  # without a last step


def check_learning(facts: Learning) -> Findings:
    for use in facts.optimizers:
        if not facts.ended or use.low_since is None or not use.peak_lr or use.lr is None:
            continue
        rest = use.steps - use.low_since + 1
        if rest < max(STEPS, SHARE * use.steps):
            continue
        schedule = next((each for each in facts.schedules if each.optimizer == use.index and each.moves), None)
        by = (
            ""
            if schedule is None
            else f" {schedule.name} was stepped {schedule.moves} times in {schedule.steps} steps."
        )
        site = use.made_at if schedule is None else _mistaken(schedule)
        yield RULE.at(
            site.place.but(step=use.low_since),
            f"the learning rate fell from {use.peak_lr:.3g} to {use.lr:.3g} by step {use.low_since}, and the other "
            f"{rest} of {use.steps} steps changed next to nothing.{by}",
            evidence={"times": rest, "steps": use.steps},
        )


def _mistaken(schedule: ScheduleUse) -> CallSite:
    """Return the line that steps a schedule too often, and else the line that makes one of too few steps."""
    per_pass = schedule.moves > OFTEN * schedule.steps  # more often than the optimizer: with gradient accumulation
    is_stepped_wrongly = per_pass or schedule.name in OF_EPOCHS or schedule.counts_epochs
    return schedule.step_site if is_stepped_wrongly and schedule.step_site.file is not None else schedule.made_at
