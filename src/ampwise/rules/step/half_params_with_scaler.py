"""FP16 parameters, which a scaler cannot unscale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerStep, Unscale
from ampwise.rules.source.half_params_with_scaler import RULE

__all__ = ["RULE", "check"]


def check(unscale: Unscale) -> Iterator[Finding]:
    if unscale.half_parameters:
        yield RULE.at(
            unscale.site.place, "the parameters are FP16: torch raises an error when unscaling their gradients"
        )


def check_step(step: ScalerStep) -> Iterator[Finding]:
    if step.half_parameters:
        yield RULE.at(
            step.site.place,
            f"parameters of {step.optimizer} are FP16: torch raises an error when unscaling their gradients",
        )
