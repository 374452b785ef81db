"""A mean over no values, or a standard deviation over one."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import operation_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP909",
    name="mean-of-nothing",
    severity=Severity.ERROR,
    summary="A mean was taken over no values, or a standard deviation over one.",
    why=(
        "The mean of nothing is 0/0, which is NaN. It happens when a mask or filter removes everything from a batch, "
        "when all labels are `ignore_index` (cross entropy averages over the others), and for the standard deviation "
        "of one value, which torch divides by n - 1 = 0. Only rare batches cause it, so it shows up late."
    ),
    fix="Divide the sum by the count, clamped to at least 1, or skip batches with nothing to learn from.",
    bad="loss = F.cross_entropy(logits, labels)  # all labels are -100",
    good=(
        'total = F.cross_entropy(logits, labels, reduction="sum")\nloss = total / (labels != -100).sum().clamp_min(1)'
    ),
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(RULE, incident, _what(incident.birth))


def _what(birth: Origin) -> str:
    return f"{operation_text(birth)} gives NaN: {_why(birth)}"


def _why(birth: Origin) -> str:
    name, empty = birth.name, any(0 in each.shape for each in birth.inputs)
    if name.startswith("nll_loss") and not empty:
        return "all labels are `ignore_index` or have weight 0, and the mean of nothing is 0/0"
    if name.startswith(("var", "std")) and not empty:
        return "there is at most one value, and it divides by n - 1"
    return "there are no values, and 0/0 is NaN"
