"""BF16 weights that are too coarse for small updates."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import OptimizerStep
from ampwise.rules.source.pure_bf16_plain_optimizer import RULE

__all__ = ["RULE", "check"]


def check(step: OptimizerStep) -> Iterator[Finding]:
    if step.plain and step.parameters == ("bf16",):
        yield RULE.at(
            step.site.place,
            f"{step.optimizer} adds its updates directly to BF16 weights, which have 8 significant bits",
        )
