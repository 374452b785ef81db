"""An eps that rounds to zero in FP16."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import OptimizerStep, ScalerStep
from ampwise.rules.source.adam_eps_half import RULE

__all__ = ["RULE", "check"]

FLUSHED = 2.0**-25  # values up to this round to zero


def check(step: OptimizerStep | ScalerStep) -> Iterator[Finding]:
    half = step.half_parameters if isinstance(step, ScalerStep) else "fp16" in step.parameters
    if half and step.eps is not None and step.eps <= FLUSHED:
        yield RULE.at(
            step.site.place,
            f"{step.optimizer} updates FP16 parameters with eps={step.eps:g}, which is 0 in FP16",
            evidence={"eps": step.eps},
        )
