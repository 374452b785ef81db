"""Steps that were timed and did not update anything."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP521",
    name="skipped-while-measured",
    severity=Severity.WARNING,
    summary="Steps were timed whose update was skipped: their times are too short.",
    why=(
        "A loss scale begins high, and is halved whenever gradients overflow; a step in which they do is over without "
        "its optimizer. Some of these are ordinary before the measuring begins. Where there are more of them, the "
        "gradients overflow time and again, and the precision looks faster than it is."
    ),
    fix="Find out why gradients overflow, or use BF16, which needs no scale.",
    bad="loss = (logits * 1e4).square().mean()",
    good="loss = logits.square().mean()",
)


def check(speeds: Speeds) -> Iterator[Finding]:
    for row in speeds.rows:
        if row.skipped:
            yield RULE.at(
                Place(device=speeds.device_name),
                f"{row.label}: {row.skipped} of the steps that were timed had no update, as gradients overflowed",
                evidence={"skipped": row.skipped, "experiment": speeds.experiment("--precisions bf16")},
            )
