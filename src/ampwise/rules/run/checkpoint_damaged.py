"""A checkpoint that is not what was written."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, one_line
from ampwise.evidence.faults import CheckpointDamaged
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP810",
    name="checkpoint-damaged",
    severity=Severity.WARNING,
    summary="A checkpoint is damaged and was passed over for an older one.",
    why=(
        "Each file of a checkpoint has a checksum in its manifest. Where one does not fit, a file is missing, or a "
        "name or size is not as written, nothing of that checkpoint is loaded. Disks, copies that were broken off "
        "and full quotas do this."
    ),
    fix="Look at the disk and at what copied the folder. The damaged checkpoint is left where it is.",
    bad="$ cp -r checkpoints /backup  # while the run writes to it",
    good="$ ampwise resume checkpoints --show",
)


def check(damaged: CheckpointDamaged) -> Iterator[Finding]:
    instead = f"{one_line(damaged.instead)} is used instead" if damaged.instead else "no other was whole"
    yield RULE.at(
        Place(file=damaged.path),
        f"the checkpoint is damaged: {one_line(damaged.why)}; {instead}",
        evidence=evidence_of(damaged),
    )
