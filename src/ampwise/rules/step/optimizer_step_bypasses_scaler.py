"""Scaled gradients applied by a direct optimizer.step()."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import OptimizerStep
from ampwise.rules.source.optimizer_step_bypasses_scaler import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    if step.scaled:
        what = "unscaled gradients directly" if step.unscaled else "gradients multiplied by the loss scale"
        yield RULE.at(
            step.site.place,
            f"`{step.optimizer}.step` applies {what}; only `scaler.step` would skip non-finite gradients",
        )
