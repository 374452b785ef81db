"""A scaler that nothing goes through."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Conduct
from ampwise.finding import Finding
from ampwise.rules.source.scaler_unused import RULE

__all__ = ["RULE", "check"]


def check(run: Conduct) -> Iterator[Finding]:
    for made in run.unused_scalers if run.steps else ():
        yield RULE.at(made.site.place, f"this GradScaler was never used, in a run of {run.steps} steps")
