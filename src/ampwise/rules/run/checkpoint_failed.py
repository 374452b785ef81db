"""A checkpoint that could not be written."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, in_a_row, one_line
from ampwise.evidence.faults import CheckpointFailed
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP808",
    name="checkpoint-failed",
    severity=Severity.ERROR,
    summary="A checkpoint could not be written; training goes on, and the older checkpoints are kept.",
    why=(
        "If the run dies now, all steps since the last whole checkpoint are lost. It is tried again when the next "
        "one is due; no old checkpoint is deleted before a new one is proven whole."
    ),
    fix="Mend what the message says while the run goes on; the next checkpoint will be tried all the same.",
    bad='torch.save(model.state_dict(), "last.pt")  # over the only copy',
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)

WAYS_OUT = {
    "full": "Make room on that disk: the run goes on, and tries again when the next checkpoint is due.",
    "read-only": "Mount it for writing again; a disk that turns read-only by itself is often a broken one.",
    "permission": "Give the user of the run the right to write there again.",
    "other": RULE.fix,
}
WHAT = {
    "full": "the disk is full",
    "read-only": "the disk is read-only",
    "permission": "the run may not write there",
}


def check(failed: CheckpointFailed) -> Iterator[Finding]:
    what = f"{WHAT[failed.kind]} ({one_line(failed.error)})" if failed.kind in WHAT else one_line(failed.error)
    again = in_a_row(failed.failures_in_a_row, "failure")
    last = f"the last whole one is {one_line(failed.last)}" if failed.last else "there is no whole one yet"
    yield RULE.at(
        Place(step=failed.step),
        f"no checkpoint could be written to {one_line(failed.directory)}: {what}{again}; {last}; training goes on",
        evidence=evidence_of(failed),
        fix=WAYS_OUT[failed.kind],
    )
