"""Scaled gradients taken for gradients."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import OptimizerStep
from ampwise.finding import Finding
from ampwise.rules.source.optimizer_step_bypasses_scaler import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    if step.scaled:
        what = "unscaled gradients as they are" if step.unscaled else "gradients multiplied by the loss scale"
        yield RULE.at(
            step.site.place, f"`{step.optimizer}.step` takes {what}; only `scaler.step` would skip those not finite"
        )
