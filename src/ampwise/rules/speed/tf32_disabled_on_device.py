"""TF32 that is off although it would be faster, in a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place
from ampwise.rules.evidence.speed import SpeedComparison
from ampwise.rules.evidence.speed_text import ratio_text
from ampwise.rules.evidence.speed_verdict import OPTIONAL
from ampwise.rules.hardware.tf32_disabled_on_device import RULE

__all__ = ["RULE", "check"]


def check(speeds: SpeedComparison) -> Iterator[Finding]:
    row = speeds.best
    if row is None or row.precision != "tf32" or row.ratio is None or "matmuls" in speeds.tf32_was_on:
        return
    if row.ratio.median >= OPTIONAL:
        yield RULE.at(
            Place(device=speeds.device_name),
            f"FP32 matmuls do not use TF32 in this script; with it, a step is {ratio_text(row.ratio.median)} as fast",
            evidence={"ratio": row.ratio.median, "experiment": speeds.experiment("--precisions fp32,tf32")},
        )
