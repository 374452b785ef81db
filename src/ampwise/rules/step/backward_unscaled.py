"""A step that divides by a loss scale which nothing was multiplied by."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import ScalerStep
from ampwise.finding import Finding
from ampwise.rules.source.backward_unscaled import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    for backward in step.unscaled:
        what = "a part of the loss" if backward.partly else "the loss"
        yield RULE.at(
            backward.site.place,
            f"{what} is not scaled, and `scaler.step` at {step.site.short} divides its gradients by the loss scale",
        )
