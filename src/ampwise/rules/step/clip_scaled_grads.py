"""Gradients clipped while they are multiplied by the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Clip
from ampwise.finding import Finding
from ampwise.rules.source.clip_scaled_grads import RULE

__all__ = ["RULE", "check"]


def check(clip: Clip) -> Iterator[Finding]:
    if clip.scaled and clip.backward is not None:
        yield RULE.at(
            clip.site.place,
            f"`{clip.function}` sees gradients that the backward pass at {clip.backward.short} left multiplied by the "
            "loss scale",
            evidence={} if clip.limit is None else {"limit": f"{clip.limit:g} over the loss scale"},
        )
