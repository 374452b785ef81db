"""A scaler that knows of one rank's share only."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import ScalerStep
from ampwise.finding import Finding
from ampwise.rules.source.fsdp_plain_gradscaler import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.fsdp:
        yield RULE.at(
            step.site.place, "the parameters are FSDP's shards, and this scaler looks at those of its own rank only"
        )
