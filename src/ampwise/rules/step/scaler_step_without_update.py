"""A scaler that is never told that the iteration is over."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import ScalerStep
from ampwise.finding import Finding
from ampwise.rules.source.scaler_step_without_update import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.again:
        yield RULE.at(
            step.site.place, "the second `scaler.step` without `scaler.update` between: torch raises an error here"
        )
