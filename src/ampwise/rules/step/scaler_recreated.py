"""A scaler that forgets what it had found out."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import ScalerMade
from ampwise.finding import Finding
from ampwise.rules.source.scaler_recreated import RULE

__all__ = ["RULE", "check"]


def check(made: ScalerMade) -> Iterator[Finding]:
    if made.stepped_before and made.enabled:
        yield RULE.at(
            made.site.place,
            "a GradScaler is made here again, after the one before it had taken steps: its scale starts anew",
        )
