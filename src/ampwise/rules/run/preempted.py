"""A run that was told to end."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, one_line, time_text
from ampwise.evidence.faults import Preempted
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP813",
    name="preempted",
    severity=Severity.INFO,
    summary="The run was told to end by a signal: it has finished its step, saved, and left.",
    why=(
        "Clusters send SIGTERM some seconds before they take a machine away. The guard finishes the step that is "
        "under way, writes a checkpoint and ends, so that no step is lost."
    ),
    fix="Start the same command again: it goes on from there.",
    bad="for x, y in loader:\n    engine.step(loss_fn, x, y)",
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)

NOTHING_SAVED = "Start the same command again: it goes on from the newest whole checkpoint, an older one."


def check(preempted: Preempted) -> Iterator[Finding]:
    if preempted.checkpoint:
        saved = f"{one_line(preempted.checkpoint)} was whole {time_text(preempted.seconds)} later"
    else:
        saved = "no checkpoint could be saved"
    yield RULE.at(
        Place(step=preempted.step),
        f"ended by {one_line(preempted.signal)} after this step; {saved}",
        evidence=evidence_of(preempted),
        fix=None if preempted.checkpoint else NOTHING_SAVED,
    )
