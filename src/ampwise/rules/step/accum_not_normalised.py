"""Accumulation of mean losses that are not divided."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import OptimizerStep, ScalerStep
from ampwise.rules.source.accum_not_normalised import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep | ScalerStep) -> Iterator[Finding]:
    for backward in step.undivided:
        yield RULE.at(
            backward.site.place,
            f"{step.backwards} backward passes accumulate before the step at {step.site.short}, each of a mean that "
            f"is not divided: the gradient is {step.backwards} times that of the whole batch",
            evidence={"backward_passes": step.backwards},
        )
