"""Scaled gradients added to unscaled ones."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerStep
from ampwise.rules.source.unscale_per_microbatch import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.unscaled_midway is not None:
        yield RULE.at(
            step.unscaled_midway.place,
            "gradients are unscaled here, and then another scaled backward pass adds to them: the step uses a sum of "
            f"{step.backwards} passes, some of which are still multiplied by the loss scale",
            evidence={"backward_passes": step.backwards},
        )
