"""A run that was ended by a signal."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line, time_text
from ampwise.rules.evidence.guard_events import Preempted

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP813",
    name="preempted",
    severity=Severity.INFO,
    summary="A signal ended the run: it finished its step, saved a checkpoint and exited.",
    why=(
        "Clusters send SIGTERM some seconds before they reclaim a machine. The guard finishes the current step, "
        "writes a checkpoint and exits, so no step is lost."
    ),
    fix="Start the same command again: it continues from there.",
    bad="for x, y in loader:\n    engine.step(loss_fn, x, y)",
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)

NOTHING_SAVED = "Start the same command again: it continues from the newest complete checkpoint, which is older."


def check(preempted: Preempted) -> Iterator[Finding]:
    if preempted.checkpoint:
        saved = f"{one_line(preempted.checkpoint)} was complete {time_text(preempted.seconds)} later"
    else:
        saved = "no checkpoint could be saved"
    yield RULE.at(
        Place(step=preempted.step),
        f"ended by {one_line(preempted.signal)} after this step; {saved}",
        evidence=event_evidence(preempted),
        fix=None if preempted.checkpoint else NOTHING_SAVED,
    )
