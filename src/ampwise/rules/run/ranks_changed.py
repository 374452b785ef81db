"""A run resumed with a different number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence
from ampwise.rules.evidence.guard_events import RanksChanged

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP815",
    name="ranks-changed",
    severity=Severity.INFO,
    summary="The run was resumed with a different number of ranks than it was saved with.",
    why=(
        "Weights and optimizer state are resharded and unchanged. Per-rank state is not: random numbers and the "
        "position in the data. So the effective batch size and the data order differ from here on, and the run is not "
        "bitwise identical to an uninterrupted one."
    ),
    fix="Keep the effective batch size: change the per-rank batch size or the accumulation by the same factor.",
    bad="$ torchrun --nproc-per-node 4 train.py --batch 32  # saved with 8 ranks",
    good="$ torchrun --nproc-per-node 4 train.py --batch 64",
)


def check(changed: RanksChanged) -> Iterator[Finding]:
    yield RULE.at(
        Place(),
        f"saved with {_ranks(changed.before)}, resumed with {_ranks(changed.after)}: the effective batch size is "
        f"{changed.after / changed.before:.3g} times the previous one, unless the per-rank batch size changed too; "
        "each rank gets new random numbers and restarts the epoch's data",
        evidence=event_evidence(changed),
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"
