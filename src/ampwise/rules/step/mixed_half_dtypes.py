"""FP16 and BF16 in one step."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ForwardCall, OptimizerStep, ScalerStep
from ampwise.rules.source.mixed_half_dtypes import RULE

__all__ = ["RULE", "check"]


def check(forward: ForwardCall) -> Iterator[Finding]:
    if forward.other_half is not None:
        yield RULE.at(
            forward.site.place,
            f"{forward.model} runs in {forward.precision.upper()} here, in a step that also ran in "
            f"{forward.other_half.upper()}",
        )


def check_step(step: OptimizerStep | ScalerStep) -> Iterator[Finding]:
    if not step.mixed_forward and {"fp16", "bf16"} <= set(step.precisions):
        yield RULE.at(step.site.place, "autocast was set to FP16 and to BF16 within this step")
