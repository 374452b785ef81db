"""A run that goes on with another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of
from ampwise.evidence.faults import RanksChanged
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP815",
    name="ranks-changed",
    severity=Severity.INFO,
    summary="The run was resumed on another number of ranks than it was saved with.",
    why=(
        "Weights and optimizer state are sharded anew and are the same. What each rank had for itself is not: its "
        "random numbers and its place in the data. So the effective batch and the order of the data differ from "
        "here, and the run is not bit for bit the one it would have been."
    ),
    fix="Keep the effective batch as it was: change the batch of a rank, or the accumulation, by the same factor.",
    bad="$ torchrun --nproc-per-node 4 train.py --batch 32  # saved with 8 ranks",
    good="$ torchrun --nproc-per-node 4 train.py --batch 64",
)


def check(changed: RanksChanged) -> Iterator[Finding]:
    yield RULE.at(
        Place(),
        f"saved with {_ranks(changed.before)}, resumed with {_ranks(changed.after)}: the effective batch is "
        f"{changed.after / changed.before:.3g} times what it was, unless the batch of a rank changed too; each rank "
        "draws other random numbers, and its data begins the epoch anew",
        evidence=evidence_of(changed),
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"
