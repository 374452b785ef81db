"""The loss scale moved in the middle of a window."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Update
from ampwise.finding import Finding
from ampwise.rules.source.update_per_microbatch import RULE

__all__ = ["RULE", "check"]


def check(update: Update) -> Iterator[Finding]:
    if update.pending and not update.steps:
        yield RULE.at(
            update.site.place,
            "`scaler.update` is called while gradients of this window wait for their step: the next pass may be "
            "multiplied by another scale than these were",
        )
