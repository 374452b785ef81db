"""FP16 gradients without a loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import OptimizerStep
from ampwise.finding import Finding
from ampwise.rules.source.fp16_no_scaler import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    alone = not step.scaled and not step.again and step.scaled_by_constant is None and step.backward is not None
    if alone and "fp16" in step.precisions and "fp16" not in step.parameters:
        beside = " beside a GradScaler" if step.scaler else ""
        yield RULE.at(
            (step.backward or step.site).place,
            f"the model ran under FP16 autocast, and this loss is not scaled: `{step.optimizer}.step` at "
            f"{step.site.short}{beside} takes what FP16 has left of its gradients",
        )
