"""NaN or inf received from another rank."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import operation_text, value_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP914",
    name="from-another-rank",
    severity=Severity.ERROR,
    summary="NaN or inf came from another rank, through a reduction or a gather.",
    why=(
        "A reduction sums over all ranks: a NaN on one reaches all of them, and each fails at the same step. The "
        "other ranks are fine; check the one that had it first, and its batch."
    ),
    fix=(
        "Check the reported rank: its batch of this step, and its log. If it is always the same rank, even with other "
        "data, suspect its device."
    ),
    bad="dist.all_reduce(statistics)  # sums of a batch that is empty on one rank: 0/0 there, NaN everywhere",
    good="dist.all_reduce(sums)\ndist.all_reduce(counts)\nmean = sums / counts.clamp_min(1)",
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        came = f"{operation_text(incident.birth)}, a collective among {incident.ranks} ranks, received"
        whose = "from another rank; it is unknown which one" if incident.rank is None else f"from rank {incident.rank}"
        yield failure_finding(RULE, incident, f"{came} {value_text(incident.birth.made)} {whose}")
