"""A plain GradScaler with FSDP, which checks only the gradients of its own rank."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerStep
from ampwise.rules.source.fsdp_plain_gradscaler import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.fsdp:
        yield RULE.at(
            step.site.place, "the parameters are FSDP shards, and this scaler checks only those of its own rank"
        )
