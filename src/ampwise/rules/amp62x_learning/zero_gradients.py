from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP626",
    name="zero-gradients",
    severity=Severity.ERROR,
    summary="Every gradient is exactly zero at every sampled step.",
    why=(
        "No weight learns. The loss does not depend on the parameters any more (a factor of zero, an output that is "
        "clamped or rounded, `argmax`), all units are off, all weights start at zero, as both factors of an adapter, "
        "a new layer is frozen while its weights are zero, or the gradients underflow. With momentum or weight decay "
        "the weights still change, which hides it."
    ),
    fix=(
        "Look at the last operations before the loss: `clamp`, `round`, `sign`, a mask, a factor of zero, a dead "
        "activation."
    ),
    bad="loss = criterion(model(x).clamp(max=0.0), y)",
    good="loss = criterion(model(x), y)",
    consequence_of=(
        "AMP625",
        "AMP638",
    ),
)

SAMPLES = 4
STEPS = 10


def check_gradients(health: GradientHealth) -> Findings:
    if health.samples >= SAMPLES and health.steps >= STEPS and health.are_all_zero:
        site = health.zeroed_at or health.zero_at
        here = "" if site is None else ": the backward pass of this operation makes them zero"
        if health.zeroed_at is not None:
            here = (
                ": all weights are filled with zeros; of two that are multiplied, each makes the other's gradient zero"
            )
        if health.frozen_zero is not None:
            name, site = health.frozen_zero
            here = f": `{name}` is all zeros and is frozen here, so that nothing before it gets a gradient"
        yield RULE.at(
            (Place() if site is None else site.place).but(step=health.recent[0].last),
            f"all {len(health.values)} gradients are exactly zero in all {health.samples} samples of {health.steps} "
            f"steps{here}",
            evidence={"samples": health.samples, "values": sum(health.values.values())},
        )
