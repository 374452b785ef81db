"""A machine on which the same is not as fast as itself."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.evidence.speed_verdict import is_noisy
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP523",
    name="too-noisy",
    severity=Severity.WARNING,
    summary="Two runs of the same precision differ by more than would be a reason to change it.",
    why=(
        "Other programs, a laptop's clock or a step of a few microseconds make times stray. A difference between two "
        "precisions says nothing if it is no larger than one between two runs of the same."
    ),
    fix="Stop what else runs on the machine, take more rounds, or a larger batch, whose step takes longer.",
    bad="$ ampwise compare train:make --rounds 2",
    good="$ ampwise compare train:make --rounds 30",
)


def check(speeds: Speeds) -> Iterator[Finding]:
    if speeds.noise is not None and is_noisy(speeds.noise):
        yield RULE.at(
            Place(device=speeds.device_name),
            f"two runs of the same differ by {speeds.noise:.0%} in {speeds.rounds} rounds: smaller differences are not "
            "told from noise",
            evidence={"noise": speeds.noise, "experiment": speeds.experiment(f"--rounds {4 * speeds.rounds}")},
        )
