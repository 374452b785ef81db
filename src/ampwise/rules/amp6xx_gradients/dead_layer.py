from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP604",
    name="dead-layer",
    severity=Severity.WARNING,
    summary="A parameter's gradient is exactly zero at every sampled step.",
    why=(
        "Such a parameter learns nothing: its units are permanently off (ReLU after a large negative bias), its "
        "output is unused or detached, or in FP16 its gradient is so small that all of it underflows. Other "
        "parameters had gradients at the same steps, so the step itself was not empty. A bias alone, "
        "such as one right before a normalisation layer, may have none without harm, and is not reported."
    ),
    fix=(
        "Check that the layer's output reaches the loss. Try a smaller learning rate or a leaky activation; in FP16, "
        "compare with its gradient in FP32."
    ),
    bad="hidden = features(x).detach()\nloss = loss_fn(head(hidden), y)",
    good="hidden = features(x)\nloss = loss_fn(head(hidden), y)",
    consequence_of=("AMP638",),
)

SAMPLES = 3  # a layer initialised to zero, as in LoRA, passes no gradient back at the first step
NAMED = 8


def check_gradients(health: GradientHealth) -> Findings:
    dead = health.dead
    if health.samples < SAMPLES or not dead:
        return
    place, step = Place(parameter=dead[0]), health.recent[-1].last
    others = f" (and {len(dead) - 1} more parameters)" if len(dead) > 1 else ""
    flushed = ", or it underflows in FP16" if health.precision == "fp16" else ""
    subject, why, fix = "this gradient", f"the layer learns nothing{flushed}", None
    if (lost := health.lost_at.get(dead[0])) is not None:
        place, subject = lost.site.place, f"the gradient of `{dead[0]}`"
        why = f"the backward pass of this operation makes it zero{flushed}"
        if lost.cancels:
            why = "two values are subtracted that are computed in the same way from the same weights: gradients cancel"
            fix = "Compute one of the two without gradients, before the weights are updated."
    yield RULE.at(
        place.but(step=step),
        f"{subject} is zero in all {health.samples} samples{others}: {why}",
        fix=fix,
        evidence={"samples": health.samples, "parameters": len(dead), "of": len(health.values), "names": dead[:NAMED]},
    )
