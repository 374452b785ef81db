"""A precision whose loss differs by more than rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.speed import LossCheck, PrecisionRow, SpeedComparison

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP520",
    name="not-the-same-loss",
    severity=Severity.ERROR,
    summary="The same weights and batch give a loss that differs from FP32 by more than rounding explains.",
    why=(
        "Rounding changes a loss by a few times the precision's epsilon, and more if the loss is sensitive to its "
        "weights. A loss that is further off, or not finite, is caused by an overflow, a cancellation, or code that "
        "behaves differently under autocast. It would not train the same model, so its speed does not matter."
    ),
    fix="Keep the affected part in FP32, and check that the loss agrees again.",
    bad="score = torch.exp(logits)  # inf in FP16 above 11",
    good="score = torch.exp(logits.float())",
)


def check(speeds: SpeedComparison) -> Iterator[Finding]:
    for row in speeds.rows:
        if row.differs:
            yield _finding(row, speeds)


def _finding(row: PrecisionRow, speeds: SpeedComparison) -> Finding:
    assert row.loss is not None
    return RULE.at(
        Place(device=speeds.device_name),
        f"not the same computation: {_how(row.label, row.loss)}",
        evidence={
            "loss": row.loss.loss,
            "reference": row.loss.reference,
            "tolerance": row.loss.tolerance,
            "finite_gradients": row.loss.finite_gradients,
            "experiment": speeds.experiment(f"--precisions {row.precision}", "--keep fp32=PATTERN"),
        },
    )


def _how(label: str, check: LossCheck) -> str:
    losses = f"the loss is {check.loss:.6g} in {label} and {check.reference:.6g} in fp32"
    if not math.isfinite(check.loss):
        return losses
    if not check.finite_gradients:
        return f"gradients are not finite in {label}, but are in fp32"
    return f"{losses}, but rounding explains at most {check.tolerance:.2g}"
