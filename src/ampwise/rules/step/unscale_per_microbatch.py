"""Scaled gradients added to unscaled ones."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import ScalerStep
from ampwise.finding import Finding
from ampwise.rules.source.unscale_per_microbatch import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.unscaled_midway is not None:
        yield RULE.at(
            step.unscaled_midway.place,
            f"gradients are unscaled here, and then another scaled backward pass adds to them: the step takes a sum of "
            f"{step.backwards} passes of which some weigh as much as the loss scale",
            evidence={"backward_passes": step.backwards},
        )
