"""The lock of a run that is no more."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, one_line
from ampwise.evidence.faults import LockTakenOver
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP816",
    name="lock-taken-over",
    severity=Severity.INFO,
    summary="The folder was locked by a run that is no more; its lock was taken over.",
    why=(
        "Two runs that write to one folder destroy each other's checkpoints, so the first locks it. A run that was "
        "killed leaves its lock behind; where its process is gone, the next one takes the lock over."
    ),
    fix="Nothing to do. If the other run is alive after all, stop one of the two, or give it a folder of its own.",
    bad='Guard(engine, "checkpoints")  # in two runs at a time',
    good='Guard(engine, f"checkpoints/{run_name}")',
)


def check(taken: LockTakenOver) -> Iterator[Finding]:
    since = f" since {one_line(taken.since)}" if taken.since else ""
    yield RULE.at(
        Place(),
        f"the folder was locked{since} by process {taken.pid} on {one_line(taken.host)}, which is no more; "
        "this run has the lock now",
        evidence=evidence_of(taken),
    )
