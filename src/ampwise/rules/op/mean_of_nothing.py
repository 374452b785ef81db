"""A mean over no values, or a deviation of a single one."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import operation
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP909",
    name="mean-of-nothing",
    severity=Severity.ERROR,
    summary="A mean was taken over no values, or a standard deviation over one.",
    why=(
        "The mean of nothing is 0/0, which is NaN. It comes up when a mask or a filter leaves nothing of a batch, "
        "when all labels are `ignore_index` (cross entropy averages over those that are not), and for the standard "
        "deviation of one value, which torch divides by n - 1 = 0. Rare batches do it, so that it shows late."
    ),
    fix="Divide the sum by the count, but by no less than 1; or leave out batches with nothing to learn from.",
    bad="loss = F.cross_entropy(logits, labels)  # all labels are -100",
    good=(
        'total = F.cross_entropy(logits, labels, reduction="sum")\nloss = total / (labels != -100).sum().clamp_min(1)'
    ),
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    return f"{operation(birth)} gives NaN: {_why(birth)}"


def _why(birth: Birth) -> str:
    name, empty = birth.name, any(0 in each.shape for each in birth.inputs)
    if name.startswith("nll_loss") and not empty:
        return "no label counts, all of them are `ignore_index` or weigh 0, and the mean of nothing is 0/0"
    if name.startswith(("var", "std")) and not empty:
        return "there is one value or none, and it divides by one less than there are"
    return "there is nothing to take it over, and 0/0 is NaN"
