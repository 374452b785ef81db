"""A closure, which computes gradients where no scaler sees them."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import ScalerStep
from ampwise.finding import Finding
from ampwise.rules.source.closure_with_scaler import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.closure:
        yield RULE.at(step.site.place, f"`scaler.step` is given a closure for {step.optimizer}")
