from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.guard.events import CheckpointDamaged

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
    good="$ ampwise checkpoints checkpoints -v",
)


def check_guard(damaged: CheckpointDamaged) -> Findings:
    yield RULE.at(Place(file=damaged.path), damaged.message, evidence=damaged.fields, fix=damaged.advice)
