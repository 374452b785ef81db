"""A step that ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line
from ampwise.rules.evidence.guard_events import StepOutOfMemory

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP812",
    name="out-of-memory",
    severity=Severity.WARNING,
    summary="A step ran out of memory.",
    why=(
        "An unusually long batch or fragmented memory is enough. The step's memory is released. If splitting is "
        "allowed, its batch is then run in smaller pieces whose gradients are summed: the same effective batch in "
        "more passes. Batch statistics (batch normalisation) are then computed per piece."
    ),
    fix=(
        "Use a smaller batch with accumulation, or activation checkpointing; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps against fragmentation."
    ),
    bad="engine = Engine(model, optimizer)",
    good="engine = Engine(model, optimizer, accumulate=4)",
)


def check(memory: StepOutOfMemory) -> Iterator[Finding]:
    if memory.splits:
        then = f"training continues with each batch in {memory.pieces:,} pieces and the same effective batch size"
    else:
        then = "splitting the batch is not allowed, so the step was not taken"
    yield RULE.at(
        Place(step=memory.step),
        f"the step ran out of memory; {then} ({one_line(memory.error)})",
        evidence=event_evidence(memory),
    )
