"""A precision that computes something else."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise.evidence.speed import LossCheck, Row, Speeds
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP520",
    name="not-the-same-loss",
    severity=Severity.ERROR,
    summary="In a precision, the same weights and batch give a loss that rounding does not explain.",
    why=(
        "Rounding moves a loss by a few times the precision's epsilon, and more where the loss is sensitive to its "
        "weights. A loss that is further off, or not finite, comes of a value that overflows, a difference in which "
        "all digits cancel, or code that does something else under autocast. It would not train the same model, so how "
        "fast it is does not matter."
    ),
    fix="Keep the part that goes wrong in FP32, and see whether the loss is the same again.",
    bad="score = torch.exp(logits)  # above 11, that is inf in FP16",
    good="score = torch.exp(logits.float())",
)


def check(speeds: Speeds) -> Iterator[Finding]:
    for row in speeds.rows:
        if row.differs:
            yield _finding(row, speeds)


def _finding(row: Row, speeds: Speeds) -> Finding:
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
        return f"gradients in {label} are not finite, and those in fp32 are"
    return f"{losses}, and rounding explains {check.tolerance:.2g} at most"
