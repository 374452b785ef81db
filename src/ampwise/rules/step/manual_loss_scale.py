"""A fixed loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import OptimizerStep
from ampwise.rules.source.manual_loss_scale import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    if step.scaled_by_constant is not None and "fp16" in (*step.precisions, *step.parameters):
        yield RULE.at(
            (step.backward or step.site).place,
            f"the loss is multiplied by a fixed {step.scaled_by_constant:g}, regardless of its gradients",
            evidence={"factor": step.scaled_by_constant},
        )
