"""Autocast that no model ran in."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Conduct
from ampwise.finding import Finding
from ampwise.rules.source.ineffective_autocast import RULE

__all__ = ["RULE", "check"]


def check(run: Conduct) -> Iterator[Finding]:
    trained = [forward for forward in run.forwards if forward.training]
    if not trained or any(forward.precision != "fp32" for forward in trained):
        return
    for site, times in run.idle_regions.items():
        yield RULE.at(
            site.place,
            f"autocast was entered here {times} times, and the model ran outside of it, in FP32",
            evidence={"times": times},
        )
