"""BF16 weights that small updates do not reach."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import OptimizerStep
from ampwise.finding import Finding
from ampwise.rules.source.pure_bf16_plain_optimizer import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    if step.plain and step.parameters == ("bf16",):
        yield RULE.at(
            step.site.place, f"{step.optimizer} adds its updates to BF16 weights, which have 8 bits to hold the sum"
        )
