from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.bench.verdict import is_noisy

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

RULE = Rule(
    code="AMP523",
    name="too-noisy",
    severity=Severity.WARNING,
    summary="Two runs of the same precision differ by more than a speedup worth having.",
    why=(
        "Other programs, a laptop's clock or a step of a few microseconds make times vary. A difference between two "
        "precisions means nothing if two runs of the same precision differ as much."
    ),
    fix="Stop other programs on the machine, use more rounds, or use a larger batch, whose step takes longer.",
    bad="$ ampwise bench train.py:make --rounds 2",
    good="$ ampwise bench train.py:make --rounds 30",
)


def check_speed(speeds: SpeedComparison) -> Findings:
    if speeds.noise is not None and is_noisy(speeds.noise):
        yield RULE.at(
            Place(device=speeds.device_name),
            f"two runs of the same precision differ by {speeds.noise:.0%} in {speeds.rounds} rounds: smaller "
            "differences are indistinguishable from noise",
            evidence={"noise": speeds.noise, "experiment": speeds.experiment(f"--rounds {4 * speeds.rounds}")},
        )
