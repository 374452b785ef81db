"""A sink that took no more rows."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.delivery import SinkTrouble, When
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP801",
    name="sink-failed",
    severity=Severity.WARNING,
    summary="A sink failed, or fell behind: it is without some of the run's numbers.",
    why=(
        "Numbers go to a sink in a thread of its own, so that a full disk, a server that is away or a package that is "
        "broken stops nothing: the sink is left alone from then on, and the training and its record go on. What the "
        "sink shows is not the whole run."
    ),
    fix="Mend what the message says, or name another target. The record has all of it: `ampwise report RUN`.",
    bad="$ ampwise run --sink tensorboard:/mnt/full/logs train.py",
    good="$ ampwise run --sink tensorboard:logs train.py",
)


WAYS_OUT = {
    When.OPENING: "Mend what the message says, or name another target.",
    When.SENDING: "Mend what the message says, or name another target.",
    When.CLOSING: "Look whether the sink has the last rows; mend what the message says.",
    When.WAITING: "Look whether its server can be reached, or set AMPWISE_SINK_WAIT to more seconds.",
    When.KEEPING_UP: "Use a sink that is nearer: jsonl or tensorboard on this machine.",
}
KEPT = "The record has all of it: `ampwise report RUN`."


def check(trouble: SinkTrouble) -> Iterator[Finding]:
    yield RULE.at(
        Place(),
        f"the sink `{trouble.sink}` {_what_happened(trouble)}",
        evidence={"sink": trouble.sink, "when": str(trouble.when), "sent": trouble.sent, "lost": trouble.lost},
        fix=f"{WAYS_OUT[trouble.when]} {KEPT}",
    )


def _what_happened(trouble: SinkTrouble) -> str:
    unsure = trouble.in_hand > 1  # one row has come through or not: it has not, or we would know
    rows = ("at least " if unsure else "") + ("1 row" if trouble.sent == 1 else f"{trouble.sent:,} rows")
    lost = ("up to " if unsure else "") + f"{trouble.lost:,}"
    if trouble.when is When.OPENING:
        return f"could not be opened: {trouble.error}"
    if trouble.when is When.SENDING:
        return f"failed after {rows}, and got no more: {trouble.error}"
    if trouble.when is When.CLOSING:
        return f"got {rows}, and failed when it was closed: {trouble.error}"
    if trouble.when is When.WAITING:
        return f"was still busy when the run was over, and was not waited for: {rows} sent, {lost} not"
    return f"is slower than the training: {lost} rows were left out, {rows} sent"
