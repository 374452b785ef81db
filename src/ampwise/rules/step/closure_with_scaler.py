"""A closure passed to scaler.step."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerStep
from ampwise.rules.source.closure_with_scaler import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.closure:
        yield RULE.at(step.site.place, f"`scaler.step` is called with a closure for {step.optimizer}")
