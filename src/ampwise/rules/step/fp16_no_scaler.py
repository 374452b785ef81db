"""FP16 training without loss scaling."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import OptimizerStep
from ampwise.rules.source.fp16_no_scaler import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    alone = not step.scaled and not step.again and step.scaled_by_constant is None and step.backward is not None
    if alone and "fp16" in step.parameters:
        yield RULE.at(
            (step.backward or step.site).place,
            "the parameters are FP16 and this loss is not scaled: gradients below 6e-8 are zero before "
            f"`{step.optimizer}.step` at {step.site.short} uses them",
            fix="Keep the parameters in FP32, run the model under FP16 autocast, and scale the loss with a GradScaler.",
        )
    elif alone and "fp16" in step.precisions:
        beside = " (although there is a GradScaler)" if step.scaler else ""
        yield RULE.at(
            (step.backward or step.site).place,
            f"the model ran under FP16 autocast and this loss is not scaled: `{step.optimizer}.step` at "
            f"{step.site.short}{beside} gets gradients that may have underflowed",
        )
