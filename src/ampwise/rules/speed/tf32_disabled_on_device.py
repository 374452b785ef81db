"""TF32 that would be worth its while, and is off, as it was compared."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.evidence.speed_verdict import OPTIONAL
from ampwise.evidence.speed_words import times
from ampwise.finding import Finding, Place
from ampwise.rules.hardware.tf32_disabled_on_device import RULE

__all__ = ["RULE", "check"]


def check(speeds: Speeds) -> Iterator[Finding]:
    row = speeds.best
    if row is None or row.precision != "tf32" or row.ratio is None or "matrix products" in speeds.tf32_was_on:
        return
    if row.ratio.median >= OPTIONAL:
        yield RULE.at(
            Place(device=speeds.device_name),
            f"FP32 matrix products do not use TF32 in this script; with it, they make a step "
            f"{times(row.ratio.median)} as fast",
            evidence={"ratio": row.ratio.median, "experiment": speeds.experiment("--precisions fp32,tf32")},
        )
