"""A checkpoint that takes longer to write than the checkpoint interval."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, time_text
from ampwise.rules.evidence.guard_events import CheckpointLate

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP809",
    name="checkpoint-late",
    severity=Severity.WARNING,
    summary="A checkpoint takes longer to write than the checkpoint interval.",
    why=(
        "Only one checkpoint is written at a time, in the background, so checkpoints are less frequent than "
        "requested, and a run that dies loses more steps. Training itself does not wait."
    ),
    fix="Write to a faster disk, or save checkpoints less often.",
    bad='Guard(engine, "/mnt/slow/run", every="1min")',
    good='Guard(engine, "/scratch/run", every="10min")',
)


def check(late: CheckpointLate) -> Iterator[Finding]:
    yield RULE.at(
        Place(step=late.step),
        f"a checkpoint has been in progress for {time_text(late.seconds)}, but one is due every "
        f"{time_text(late.every)}",
        evidence=event_evidence(late),
    )
