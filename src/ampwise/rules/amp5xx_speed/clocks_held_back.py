from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

RULE = Rule(
    code="AMP522",
    name="clocks-held-back",
    severity=Severity.WARNING,
    summary="The GPU lowered its clock during the measurement, for a reason other than its power limit.",
    why=(
        "A GPU that overheats, or lacks power, runs slower than it can. Precisions that use more power are affected "
        "more, so the ratios are too small. The power limit is normal for large matmuls and only noted."
    ),
    fix="Check its cooling and what else runs on it, then measure again; `nvidia-smi -q -d PERFORMANCE` shows details.",
    bad="$ ampwise bench train.py:make  # while another job uses the same GPU",
    good="$ CUDA_VISIBLE_DEVICES=1 ampwise bench train.py:make",
)

ORDINARY = "its power limit"


def check_speed(speeds: SpeedComparison) -> Findings:
    clocks = speeds.clocks
    if clocks is not None and (reasons := [reason for reason in clocks.held_back_by if reason != ORDINARY]):
        yield RULE.at(
            Place(device=speeds.device_name),
            f"throttled by {' and '.join(reasons)} during the measurement: as low as {clocks.lowest} MHz of "
            f"{clocks.top} MHz",
            evidence={"lowest": clocks.lowest, "top": clocks.top, "experiment": speeds.experiment()},
        )
