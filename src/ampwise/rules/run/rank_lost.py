"""A rank that died or hangs."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line, time_text
from ampwise.rules.evidence.guard_events import RankLost

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP814",
    name="rank-lost",
    severity=Severity.ERROR,
    summary="Another rank died or hangs, so this one stopped too.",
    why=(
        "All ranks synchronise on each step. A rank that does not answer within the time limit is dead or stuck, and "
        "the others would wait for it forever, holding their GPUs. They stop cleanly instead, and leave the "
        "checkpoints as they are."
    ),
    fix="Check the output of the other ranks: the first one to fail shows the cause. Then start the same command "
    "again.",
    bad="$ python train.py  # started manually on each machine",
    good="$ torchrun --max-restarts 3 train.py",
)


def check(lost: RankLost) -> Iterator[Finding]:
    if lost.checkpoint:
        last = f"the last complete checkpoint is {one_line(lost.checkpoint)}"
    else:
        last = "there is no complete checkpoint yet"
    how = f"a rank did not answer within {time_text(lost.waited)}" if lost.waited else "a rank is gone"
    yield RULE.at(
        Place(step=lost.step),
        f"{how}, so this one stops ({one_line(lost.error)}); {last}",
        evidence=event_evidence(lost),
    )
