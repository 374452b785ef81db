"""A scaler that steps twice without an update."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerStep
from ampwise.rules.source.scaler_step_without_update import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.again:
        yield RULE.at(
            step.site.place, "the second `scaler.step` without a `scaler.update` in between: torch raises an error here"
        )
