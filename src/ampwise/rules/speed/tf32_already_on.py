"""A script that has TF32 on, whose FP32 is not the FP32 of a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.evidence.speed_words import times
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP518",
    name="tf32-already-on",
    severity=Severity.INFO,
    summary="The script's own FP32 products run in TF32: what it gains by 16 bits is less than the ratio to FP32.",
    why=(
        "With TF32 on, FP32 products use the matrix units already. A comparison switches it off for its row fp32, "
        "which is the common ground of all numbers that are published, and on for its row tf32. Of the two, the script "
        "runs as the latter does today. For convolutions torch has it on unless told otherwise."
    ),
    fix="Compare with the row tf32, which is what the script runs as today.",
    bad="$ ampwise compare train:make --precisions fp32,bf16",
    good="$ ampwise compare train:make --precisions fp32,tf32,bf16",
)


def check(speeds: Speeds) -> Iterator[Finding]:
    if not speeds.tf32_was_on:
        return
    best, today = speeds.best, speeds.row("tf32")
    gain = None
    if best is not None and today is not None and best.step_s is not None and today.step_s is not None:
        gain = today.step_s.median / best.step_s.median
    then = f"; from there, {best.label} is {times(gain)} as fast" if gain and best and best is not today else ""
    yield RULE.at(
        Place(device=speeds.device_name),
        f"TF32 is on for {' and '.join(speeds.tf32_was_on)} in this script, so that it runs as the row tf32 does{then}",
        evidence={"gain": gain, "experiment": speeds.experiment("--precisions fp32,tf32,bf16")},
    )
