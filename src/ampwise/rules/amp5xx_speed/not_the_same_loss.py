from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

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


def check_speed(speeds: SpeedComparison) -> Findings:
    for row in speeds.rows:
        check = row.loss
        if not row.differs or check is None:
            continue
        how = f"the loss is {check.loss:.6g} in {row.label} and {check.reference:.6g} in fp32"
        if math.isfinite(check.loss) and check.finite_gradients:
            how += f", but rounding explains at most {check.tolerance:.2g}"
        elif math.isfinite(check.loss):
            how = f"gradients are not finite in {row.label}, but are in fp32"
        yield RULE.at(
            Place(device=speeds.device_name),
            f"not the same computation: {how}",
            evidence={
                "loss": check.loss,
                "reference": check.reference,
                "tolerance": check.tolerance,
                "finite_gradients": check.finite_gradients,
                "experiment": speeds.experiment(f"--precisions {row.precision}", "--keep fp32=PATTERN"),
            },
        )
