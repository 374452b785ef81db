"""A checkpoint that takes longer than it may."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, time_text
from ampwise.evidence.faults import CheckpointLate
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP809",
    name="checkpoint-late",
    severity=Severity.WARNING,
    summary="A checkpoint takes longer to write than there is time between two of them.",
    why=(
        "Only one is written at a time, in the background, so checkpoints come later than asked for, and a run that "
        "dies loses more steps. Training itself does not wait."
    ),
    fix="Write to a faster disk, or ask for checkpoints less often.",
    bad='Guard(engine, "/mnt/slow/run", every="1min")',
    good='Guard(engine, "/scratch/run", every="10min")',
)


def check(late: CheckpointLate) -> Iterator[Finding]:
    yield RULE.at(
        Place(step=late.step),
        f"a checkpoint has been under way for {time_text(late.seconds)}, and one is due every {time_text(late.every)}",
        evidence=evidence_of(late),
    )
