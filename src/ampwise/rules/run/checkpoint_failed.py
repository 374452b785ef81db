"""A checkpoint that could not be written."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line, streak_text
from ampwise.rules.evidence.guard_events import CheckpointFailed

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP808",
    name="checkpoint-failed",
    severity=Severity.ERROR,
    summary="A checkpoint could not be written; training continues, and the older checkpoints are kept.",
    why=(
        "If the run dies now, all steps since the last complete checkpoint are lost. Writing is retried when the next "
        "checkpoint is due; no old checkpoint is deleted before a new one is verified."
    ),
    fix="Fix the reported problem while the run continues; writing is retried when the next checkpoint is due.",
    bad='torch.save(model.state_dict(), "last.pt")  # over the only copy',
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)

FIXES = {
    "full": "Free space on that disk: the run continues, and retries when the next checkpoint is due.",
    "read-only": "Remount it for writing; a disk that turns read-only by itself is often failing.",
    "permission": "Restore write permission there for the user of the run.",
    "other": RULE.fix,
}
WHAT = {
    "full": "the disk is full",
    "read-only": "the disk is read-only",
    "permission": "the run has no write permission there",
}


def check(failed: CheckpointFailed) -> Iterator[Finding]:
    what = f"{WHAT[failed.kind]} ({one_line(failed.error)})" if failed.kind in WHAT else one_line(failed.error)
    again = streak_text(failed.failures_in_a_row, "failure")
    last = f"the last complete one is {one_line(failed.last)}" if failed.last else "there is no complete one yet"
    yield RULE.at(
        Place(step=failed.step),
        f"no checkpoint could be written to {one_line(failed.directory)}: {what}{again}; {last}; training continues",
        evidence=event_evidence(failed),
        fix=FIXES[failed.kind],
    )
