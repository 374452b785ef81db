"""A sink that failed or fell behind."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.sink_failure import SinkFailure, SinkPhase

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP801",
    name="sink-failed",
    severity=Severity.WARNING,
    summary="A sink failed or fell behind, and lacks some of the run's numbers.",
    why=(
        "Each sink runs in its own thread, so a full disk, an unreachable server or a broken package does not stop "
        "the run: the sink is dropped, and training and its record continue. The sink then does not show the whole "
        "run."
    ),
    fix="Fix the reported problem, or choose another target. The record is complete: `ampwise report RUN`.",
    bad="$ ampwise run --sink tensorboard:/mnt/full/logs train.py",
    good="$ ampwise run --sink tensorboard:logs train.py",
)


FIXES = {
    SinkPhase.OPENING: "Fix the reported problem, or choose another target.",
    SinkPhase.SENDING: "Fix the reported problem, or choose another target.",
    SinkPhase.CLOSING: "Check whether the sink has the last rows, and fix the reported problem.",
    SinkPhase.WAITING: "Check whether its server is reachable, or set AMPWISE_SINK_WAIT to more seconds.",
    SinkPhase.KEEPING_UP: "Use a local sink, such as jsonl or tensorboard on this machine.",
}
KEPT = "The record is complete: `ampwise report RUN`."


def check(trouble: SinkFailure) -> Iterator[Finding]:
    yield RULE.at(
        Place(),
        f"the sink `{trouble.sink}` {_what_happened(trouble)}",
        evidence={"sink": trouble.sink, "when": str(trouble.when), "sent": trouble.sent, "lost": trouble.lost},
        fix=f"{FIXES[trouble.when]} {KEPT}",
    )


def _what_happened(trouble: SinkFailure) -> str:
    unsure = trouble.in_hand > 1  # a single row in flight is known to be lost
    rows = ("at least " if unsure else "") + ("1 row" if trouble.sent == 1 else f"{trouble.sent:,} rows")
    lost = ("up to " if unsure else "") + f"{trouble.lost:,}"
    if trouble.when is SinkPhase.OPENING:
        return f"could not be opened: {trouble.error}"
    if trouble.when is SinkPhase.SENDING:
        return f"failed after {rows} and was dropped: {trouble.error}"
    if trouble.when is SinkPhase.CLOSING:
        return f"received {rows}, and failed on closing: {trouble.error}"
    if trouble.when is SinkPhase.WAITING:
        return f"was still busy when the run ended and was abandoned: {rows} sent, {lost} not"
    return f"is slower than the training: {lost} rows were dropped, {rows} sent"
