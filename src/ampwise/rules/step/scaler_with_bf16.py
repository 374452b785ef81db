"""A loss scale that BF16 does not need."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import RunEvents
from ampwise.rules.source.scaler_with_bf16 import RULE

__all__ = ["RULE", "check"]


def check(run: RunEvents) -> Iterator[Finding]:
    for made in run.scalers:
        if made.enabled and "bf16" in made.precisions and "fp16" not in made.precisions:
            yield RULE.at(made.site.place, "this GradScaler scales losses of forward passes that ran in BF16")
