"""A scaler updated after each of several optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Update
from ampwise.finding import Finding
from ampwise.rules.source.one_scaler_updated_per_optimizer import RULE

__all__ = ["RULE", "check"]


def check(update: Update) -> Iterator[Finding]:
    if update.earlier and update.earlier_site is not None:
        yield RULE.at(
            update.site.place,
            f"the scaler is updated after one optimizer's step here and after another's at {update.earlier_site.short}: "
            "it counts twice as many steps as there are, and one optimizer's overflow lowers the other's scale midway",
        )
