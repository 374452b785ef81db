from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.bench.verdict import ratio_text

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

RULE = Rule(
    code="AMP518",
    name="tf32-already-on",
    severity=Severity.INFO,
    summary="The script already runs FP32 matmuls in TF32, so 16-bit gains less than the ratio to FP32 suggests.",
    why=(
        "With TF32 on, FP32 matmuls already use the tensor cores. A comparison turns it off for its fp32 row, which "
        "is the common baseline of published numbers, and on for its tf32 row. The script currently runs like the "
        "tf32 row. For convolutions TF32 is on by default."
    ),
    fix="Compare with the tf32 row, which is how the script runs today.",
    bad="$ ampwise bench train.py:make --precisions fp32,bf16",
    good="$ ampwise bench train.py:make --precisions fp32,tf32,bf16",
)


def check_speed(speeds: SpeedComparison) -> Findings:
    if not speeds.tf32_was_on:
        return
    best, today, gain, then = speeds.best, speeds.row("tf32"), None, ""
    if best is not None and today is not None and best.step_s is not None and today.step_s is not None:
        gain = today.step_s.median / best.step_s.median
        then = f"; compared to that, {best.label} is {ratio_text(gain)} as fast" if gain and best is not today else ""
    yield RULE.at(
        Place(device=speeds.device_name),
        f"TF32 is on for {' and '.join(speeds.tf32_was_on)} in this script, so it runs like the tf32 row{then}",
        evidence={"gain": gain, "experiment": speeds.experiment("--precisions fp32,tf32,bf16")},
    )
