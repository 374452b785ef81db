"""A run that rolled back to an earlier state."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line, step_count_text, time_text
from ampwise.rules.evidence.guard_events import RolledBack

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP804",
    name="rolled-back",
    severity=Severity.WARNING,
    summary="The run rolled back to its last good state and skips the batches that led away from it.",
    why=(
        "Skipping steps did not help, so the weights, the optimizer, the schedule, the loss scale and the random "
        "state were restored to those of a step after which the run was healthy for a while. Bad batches are skipped "
        "from now on, also after a later resume: the list is saved in the checkpoint."
    ),
    fix=(
        "Inspect the reported batches: the data may be bad. If the run keeps rolling back, lower the learning rate or "
        "clip gradients harder."
    ),
    bad="for x, y in loader:\n    engine.step(loss_fn, x, y)",
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)

NAMED = 5  # batches


def check(rolled: RolledBack) -> Iterator[Finding]:
    lost = rolled.step - rolled.to_step
    yield RULE.at(
        Place(step=rolled.step),
        f"rolled back {step_count_text(lost)}, to step {rolled.to_step:,}, from {rolled.source} in "
        f"{time_text(rolled.milliseconds / 1e3)}, because {one_line(rolled.cause)}; {_data(rolled)}",
        evidence=event_evidence(rolled) | {"steps_undone": lost},
    )


def _data(rolled: RolledBack) -> str:
    came = "the data was rewound too" if rolled.rewound else "the data continues from its current position"
    if not rolled.passed_over:
        return came
    by_epoch: dict[int, list[int]] = {}
    for epoch, batch in rolled.passed_over[:NAMED]:
        by_epoch.setdefault(epoch, []).append(batch)
    named = ", ".join(f"{_batches(batches)} of epoch {epoch}" for epoch, batches in by_epoch.items())
    more = len(rolled.passed_over) - NAMED
    others = f" and {more:,} more" if more > 0 else ""
    return f"{came}, and {named}{others}, counted from 0, will be skipped"


def _batches(batches: list[int]) -> str:
    return f"batch{'es' if len(batches) > 1 else ''} {', '.join(map(str, batches))}"
