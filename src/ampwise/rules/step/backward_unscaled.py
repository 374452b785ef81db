"""A step that unscales gradients that were never scaled."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerStep
from ampwise.rules.source.backward_unscaled import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    for backward in step.unscaled:
        what = "part of the loss" if backward.partly else "the loss"
        yield RULE.at(
            backward.site.place,
            f"{what} is not scaled, but `scaler.step` at {step.site.short} divides its gradients by the loss scale",
        )
