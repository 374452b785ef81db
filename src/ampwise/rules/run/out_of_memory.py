"""A step that did not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, one_line
from ampwise.evidence.faults import OutOfMemory
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP812",
    name="out-of-memory",
    severity=Severity.WARNING,
    summary="A step ran out of memory.",
    why=(
        "A batch longer than the others, or memory in pieces, is enough. What the step held is released. Where it "
        "is allowed, its batch is then run in smaller pieces whose gradients are summed: the same effective batch, "
        "in more passes. Statistics over a batch (batch normalisation) are those of a piece then."
    ),
    fix=(
        "Use a smaller batch with accumulation, or activation checkpointing; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps where memory is in pieces."
    ),
    bad="engine = Engine(model, optimizer)",
    good="engine = Engine(model, optimizer, accumulate=4)",
)


def check(memory: OutOfMemory) -> Iterator[Finding]:
    if memory.splits:
        then = f"it goes on with each batch in {memory.pieces:,} pieces, and the same effective batch"
    else:
        then = "its batch may not be split, so the step was not made"
    yield RULE.at(
        Place(step=memory.step),
        f"the step ran out of memory; {then} ({one_line(memory.error)})",
        evidence=evidence_of(memory),
    )
