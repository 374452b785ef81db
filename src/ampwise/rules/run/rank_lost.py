"""A rank that died or hangs."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, one_line, time_text
from ampwise.evidence.faults import RankLost
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP814",
    name="rank-lost",
    severity=Severity.ERROR,
    summary="Another rank died or hangs, so this one has stopped too.",
    why=(
        "All ranks agree on each step. One that does not answer within the time limit is gone or stuck, and the "
        "others would wait for it without end, holding their GPUs. They stop instead, cleanly, and leave the "
        "checkpoints as they are."
    ),
    fix="Look at the output of the other ranks: the first to fail has the cause. Then start the same command again.",
    bad="$ python train.py  # on each machine by hand",
    good="$ torchrun --max-restarts 3 train.py",
)


def check(lost: RankLost) -> Iterator[Finding]:
    if lost.checkpoint:
        last = f"the last whole checkpoint is {one_line(lost.checkpoint)}"
    else:
        last = "there is no whole checkpoint yet"
    how = f"a rank did not answer within {time_text(lost.waited)}" if lost.waited else "a rank is gone"
    yield RULE.at(
        Place(step=lost.step),
        f"{how}, and this one stops ({one_line(lost.error)}); {last}",
        evidence=evidence_of(lost),
    )
