"""A scaler that is updated after each of several optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerUpdate
from ampwise.rules.source.one_scaler_updated_per_optimizer import RULE

__all__ = ["RULE", "check"]


def check(update: ScalerUpdate) -> Iterator[Finding]:
    if update.earlier and update.earlier_site is not None:
        yield RULE.at(
            update.site.place,
            "the scaler is updated after one optimizer's step here, and again after another's at "
            f"{update.earlier_site.short}: it counts each iteration twice towards growth",
        )
