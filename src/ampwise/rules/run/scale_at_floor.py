"""A loss scale at its lower limit."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, step_count_text
from ampwise.rules.evidence.guard_events import ScaleAtFloor
from ampwise.rules.evidence.number_text import scale_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP803",
    name="scale-at-floor",
    severity=Severity.WARNING,
    summary="Gradients overflow at the lowest loss scale allowed: the scale is not the cause.",
    why=(
        "Loss scaling keeps small FP16 gradients from underflowing; when gradients overflow, the scale is lowered. At "
        "its lower limit they are hardly scaled at all, so something else is wrong: a value in the forward pass that "
        "FP16 cannot hold, or bad data. The guard now rolls back to the last good state, and then changes the "
        "precision."
    ),
    fix=(
        "See the finding that reports the operation (AMP9...). If the model keeps overflowing in FP16, train it in "
        "BF16, or keep the operation in FP32."
    ),
    bad='engine = Engine(model, optimizer, precision="fp16")',
    good='engine = Engine(model, optimizer, precision="bf16")',
)


def check(floor: ScaleAtFloor) -> Iterator[Finding]:
    yield RULE.at(
        Place(step=floor.step),
        f"{step_count_text(floor.streak)} in a row overflowed with the loss scale at its lower limit of "
        f"{scale_text(floor.scale)}: a lower scale will not help",
        evidence=event_evidence(floor),
    )
