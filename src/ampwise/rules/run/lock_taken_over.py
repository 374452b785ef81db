"""A stale lock, left by a run that has ended."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line
from ampwise.rules.evidence.guard_events import LockTakenOver

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP816",
    name="lock-taken-over",
    severity=Severity.INFO,
    summary="The folder was locked by a run that no longer exists; its lock was taken over.",
    why=(
        "Two runs that write to one folder destroy each other's checkpoints, so the first one locks it. A run that "
        "was killed leaves its lock behind; if its process is gone, the next run takes the lock over."
    ),
    fix="Nothing to do. If the other run is alive after all, stop one of them, or use separate folders.",
    bad='Guard(engine, "checkpoints")  # in two concurrent runs',
    good='Guard(engine, f"checkpoints/{run_name}")',
)


def check(taken: LockTakenOver) -> Iterator[Finding]:
    since = f" since {one_line(taken.since)}" if taken.since else ""
    yield RULE.at(
        Place(),
        f"the folder was locked{since} by process {taken.pid} on {one_line(taken.host)}, which no longer exists; this "
        "run now holds the lock",
        evidence=event_evidence(taken),
    )
