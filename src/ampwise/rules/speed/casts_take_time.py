"""Casts that take a notable part of the step time in a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place
from ampwise.rules.evidence.speed import SpeedComparison
from ampwise.rules.time.casts_take_time import MUCH, RULE

__all__ = ["RULE", "check"]


def check(speeds: SpeedComparison) -> Iterator[Finding]:
    row = speeds.judged
    share = 0.0 if row is None or row.split is None else row.split.share("casts")
    if row is not None and share > MUCH:
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{row.label}: {share:.0%} of the time goes into casts",
            evidence={"share": share, "experiment": speeds.experiment("--compile")},
        )
