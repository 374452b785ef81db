"""A loss scale that can fall no further."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, steps
from ampwise.evidence.faults import ScaleAtFloor
from ampwise.evidence.wording import scale_text
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP803",
    name="scale-at-floor",
    severity=Severity.WARNING,
    summary="Gradients overflow at the lowest loss scale allowed: the scale is not the cause.",
    why=(
        "A loss scale keeps small gradients of FP16 from vanishing; where gradients overflow, it is lowered. At its "
        "floor they are hardly scaled at all, so something else is wrong: a value in the forward pass that FP16 "
        "cannot hold, or bad data. From here the guard goes back to the last good state, and then to another "
        "precision."
    ),
    fix=(
        "Look at the finding that names the operation (AMP9...). If the model overflows in FP16 again and again, "
        "train it in BF16, or keep the operation in FP32."
    ),
    bad='engine = Engine(model, optimizer, precision="fp16")',
    good='engine = Engine(model, optimizer, precision="bf16")',
)


def check(floor: ScaleAtFloor) -> Iterator[Finding]:
    yield RULE.at(
        Place(step=floor.step),
        f"{steps(floor.streak)} in a row overflowed, and the loss scale is at its floor of {scale_text(floor.scale)}: "
        "a lower scale will not help",
        evidence=evidence_of(floor),
    )
