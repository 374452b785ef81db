"""Gradients that are clipped while multiplied by the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import Clip
from ampwise.rules.source.clip_scaled_grads import RULE

__all__ = ["RULE", "check"]


def check(clip: Clip) -> Iterator[Finding]:
    if clip.scaled and clip.backward is not None:
        yield RULE.at(
            clip.site.place,
            f"`{clip.function}` gets gradients that are still multiplied by the loss scale from the backward pass at "
            f"{clip.backward.short}",
            evidence={} if clip.limit is None else {"limit": f"{clip.limit:g} divided by the loss scale"},
        )
