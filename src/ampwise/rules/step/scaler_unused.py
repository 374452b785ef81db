"""A scaler that is never used."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import RunEvents
from ampwise.rules.source.scaler_unused import RULE

__all__ = ["RULE", "check"]


def check(run: RunEvents) -> Iterator[Finding]:
    for made in run.unused_scalers if run.steps else ():
        yield RULE.at(made.site.place, f"this GradScaler was never used, in a run of {run.steps} steps")
