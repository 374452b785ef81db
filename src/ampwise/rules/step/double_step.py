"""Two optimizer steps for one backward pass."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import OptimizerStep, ScalerStep
from ampwise.rules.source.double_step import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    if step.again:
        yield RULE.at(
            step.site.place,
            "the optimizer steps again with gradients that `scaler.step` has just applied or skipped",
        )


def check_scaler(step: ScalerStep) -> Iterator[Finding]:
    if step.bare:
        yield RULE.at(step.site.place, "`scaler.step` applies gradients that `optimizer.step` has just applied")
