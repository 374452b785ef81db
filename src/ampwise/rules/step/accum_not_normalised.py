"""Means of micro-batches added up."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import OptimizerStep, ScalerStep
from ampwise.finding import Finding
from ampwise.rules.source.accum_not_normalised import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep | ScalerStep) -> Iterator[Finding]:
    for backward in step.undivided:
        yield RULE.at(
            backward.site.place,
            f"{step.backwards} backward passes add up before the step at {step.site.short}, each of a mean that "
            f"nothing divides: the gradient is {step.backwards} times that of the whole batch",
            evidence={"backward_passes": step.backwards},
        )
