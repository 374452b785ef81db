from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

RULE = Rule(
    code="AMP521",
    name="skipped-while-measured",
    severity=Severity.WARNING,
    summary="Some timed steps skipped their update, so their times are too short.",
    why=(
        "A loss scale starts high and is halved whenever gradients overflow; such a step ends without the optimizer "
        "update. A few of these are normal before the measurement starts. If there are more, the gradients overflow "
        "repeatedly, and the precision looks faster than it is."
    ),
    fix="Find out why gradients overflow, or use BF16, which needs no scale.",
    bad="loss = (logits * 1e4).square().mean()",
    good="loss = logits.square().mean()",
)


def check_speed(speeds: SpeedComparison) -> Findings:
    for row in speeds.rows:
        if row.skipped:
            yield RULE.at(
                Place(device=speeds.device_name),
                f"{row.label}: {row.skipped} of the timed steps skipped the update because gradients overflowed",
                evidence={"skipped": row.skipped, "experiment": speeds.experiment("--precisions bf16")},
            )
