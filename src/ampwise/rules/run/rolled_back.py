"""A run that went back to an earlier state."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, one_line, steps, time_text
from ampwise.evidence.faults import RolledBack
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP804",
    name="rolled-back",
    severity=Severity.WARNING,
    summary="The run went back to its last good state, and passes over the batches that led away from it.",
    why=(
        "Skipping steps did not help, so the weights, the optimizer, the schedule, the loss scale and the random "
        "numbers are again those of a step after which the run was healthy for a while. Batches that were bad are "
        "left out, also when the run is resumed later: what is passed over is in the checkpoint."
    ),
    fix=(
        "Look at the batches named: the data may be bad there. If it goes back again and again, lower the learning "
        "rate or clip gradients harder."
    ),
    bad="for x, y in loader:\n    engine.step(loss_fn, x, y)",
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)

NAMED = 5  # batches


def check(rolled: RolledBack) -> Iterator[Finding]:
    lost = rolled.step - rolled.to_step
    yield RULE.at(
        Place(step=rolled.step),
        f"went back {steps(lost)}, to step {rolled.to_step:,}, from {rolled.source} in "
        f"{time_text(rolled.milliseconds / 1e3)}, because {one_line(rolled.cause)}; {_data(rolled)}",
        evidence=evidence_of(rolled) | {"steps_undone": lost},
    )


def _data(rolled: RolledBack) -> str:
    came = "the data went back too" if rolled.rewound else "the data goes on from where it was"
    if not rolled.passed_over:
        return came
    by_epoch: dict[int, list[int]] = {}
    for epoch, batch in rolled.passed_over[:NAMED]:
        by_epoch.setdefault(epoch, []).append(batch)
    named = ", ".join(f"{_batches(batches)} of epoch {epoch}" for epoch, batches in by_epoch.items())
    more = len(rolled.passed_over) - NAMED
    others = f" and {more:,} more" if more > 0 else ""
    return f"{came}, and passes over {named}{others}, counted from 0"


def _batches(batches: list[int]) -> str:
    return f"batch{'es' if len(batches) > 1 else ''} {', '.join(map(str, batches))}"
