"""NaN or inf that another rank has sent."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Incident
from ampwise.evidence.incident_words import made_of, operation
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP914",
    name="from-another-rank",
    severity=Severity.ERROR,
    summary="NaN or inf came from another rank, through a reduction or a gather.",
    why=(
        "A reduction adds up what all ranks have: one with a NaN gives it to all, and each of them fails at the same "
        "step. Nothing is wrong on the others; look at the one that had it first, and at its batch."
    ),
    fix=(
        "Look at the rank named: at its batch of this step, and at its log. If it is the same one over and over, also "
        "with other data, suspect its device."
    ),
    bad="dist.all_reduce(statistics)  # sums of a batch that is empty on one rank: 0/0 there, NaN everywhere",
    good="dist.all_reduce(sums)\ndist.all_reduce(counts)\nmean = sums / counts.clamp_min(1)",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        came = f"{operation(incident.birth)}, an exchange among {incident.ranks} ranks, brought"
        whose = "from another rank; which one is not known" if incident.rank is None else f"from rank {incident.rank}"
        yield told(RULE, incident, f"{came} {made_of(incident.birth.made)} {whose}")
