from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.guard.events import RankLost

RULE = Rule(
    code="AMP814",
    name="rank-lost",
    severity=Severity.ERROR,
    summary="Another rank died or hangs, so this one stopped too.",
    why=(
        "All ranks synchronise on each step. A rank that does not answer in time is dead or stuck, and the others "
        "would wait for it forever, holding their GPUs. They stop cleanly and leave the checkpoints as they are."
    ),
    fix="Check the output of the other ranks: the first one to fail shows the cause. Then start the same command "
    "again.",
    bad="$ python train.py  # started manually on each machine",
    good="$ torchrun --max-restarts 3 train.py",
)


def check_guard(lost: RankLost) -> Findings:
    yield RULE.at(Place(step=lost.step), lost.message, evidence=lost.fields, fix=lost.advice)
