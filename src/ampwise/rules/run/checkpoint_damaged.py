"""A damaged checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line
from ampwise.rules.evidence.guard_events import CheckpointDamaged

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP810",
    name="checkpoint-damaged",
    severity=Severity.WARNING,
    summary="A checkpoint is damaged; an older one was used.",
    why=(
        "The manifest holds a checksum for each file of a checkpoint. If one does not match, a file is missing, or a "
        "name or size differs, nothing of that checkpoint is loaded. Failing disks, interrupted copies and full "
        "quotas cause this."
    ),
    fix="Check the disk, and whatever copied the folder. The damaged checkpoint is left in place.",
    bad="$ cp -r checkpoints /backup  # while the run writes to it",
    good="$ ampwise resume checkpoints --show",
)


def check(damaged: CheckpointDamaged) -> Iterator[Finding]:
    instead = f"{one_line(damaged.instead)} is used instead" if damaged.instead else "there is no other complete one"
    yield RULE.at(
        Place(file=damaged.path),
        f"the checkpoint is damaged: {one_line(damaged.why)}; {instead}",
        evidence=event_evidence(damaged),
    )
