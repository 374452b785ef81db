"""A GPU that was too hot, or short of power, while it was measured."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP522",
    name="clocks-held-back",
    severity=Severity.WARNING,
    summary="The GPU lowered its clock while it was measured, for another reason than its power limit.",
    why=(
        "A GPU that gets too hot, or is told to brake by its power supply, runs slower than it can. Precisions that "
        "use more power are hit harder, so ratios are too small. To run at the power limit is ordinary for large "
        "matrix products, and is only noted."
    ),
    fix="See to its cooling and to what else runs on it, then measure again; `nvidia-smi -q -d PERFORMANCE` says more.",
    bad="$ ampwise compare train:make  # beside another job on the same GPU",
    good="$ CUDA_VISIBLE_DEVICES=1 ampwise compare train:make",
)
ORDINARY = "its power limit"


def check(speeds: Speeds) -> Iterator[Finding]:
    clocks = speeds.clocks
    reasons = [] if clocks is None else [reason for reason in clocks.held_back_by if reason != ORDINARY]
    if clocks is not None and reasons:
        yield RULE.at(
            Place(device=speeds.device_name),
            f"held back by {' and '.join(reasons)} while it was measured: {clocks.lowest} MHz at the lowest, of "
            f"{clocks.top}",
            evidence={"lowest": clocks.lowest, "top": clocks.top, "experiment": speeds.experiment()},
        )
