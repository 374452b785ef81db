"""A loss scale by hand."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import OptimizerStep
from ampwise.finding import Finding
from ampwise.rules.source.manual_loss_scale import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    if step.scaled_by_constant is not None and "fp16" in (*step.precisions, *step.parameters):
        yield RULE.at(
            (step.backward or step.site).place,
            f"the loss is multiplied by {step.scaled_by_constant:g}, whatever its gradients are like",
            evidence={"factor": step.scaled_by_constant},
        )
