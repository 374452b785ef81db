"""A loss scale that is updated within an accumulation window."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerUpdate
from ampwise.rules.source.update_per_microbatch import RULE

__all__ = ["RULE", "check"]


def check(update: ScalerUpdate) -> Iterator[Finding]:
    if update.pending and not update.steps:
        yield RULE.at(
            update.site.place,
            "`scaler.update` is called while accumulated gradients still wait for their step: the next pass may use a "
            "different scale",
        )
