"""A scaler that is recreated and loses its scale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerCreated
from ampwise.rules.source.scaler_recreated import RULE

__all__ = ["RULE", "check"]


def check(made: ScalerCreated) -> Iterator[Finding]:
    if made.stepped_before and made.enabled:
        yield RULE.at(
            made.site.place,
            "a GradScaler is created here again, after the previous one took steps: its scale is reset",
        )
