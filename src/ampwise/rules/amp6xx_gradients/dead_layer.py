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
    dead = [name for name, values in health.values.items() if values and values == health.zeros[name]]
    alive = [name for name, values in health.values.items() if values > health.zeros[name]]
    # In a bias alone the gradients cancel: before a normalisation, or in the difference of two outputs.
    dead = [name for name in dead if not name.endswith("bias") or f"{name.removesuffix('bias')}weight" not in alive]
    if health.samples < SAMPLES or not dead or not alive:
        return
    others = f" (and {len(dead) - 1} more parameters)" if len(dead) > 1 else ""
    flushed = ", or it underflows in FP16" if health.precision == "fp16" else ""
    yield RULE.at(
        Place(parameter=dead[0], step=health.recent[-1].last),
        f"this gradient is zero in all {health.samples} samples{others}: the layer learns nothing{flushed}",
        evidence={"samples": health.samples, "parameters": len(dead), "of": len(health.values), "names": dead[:NAMED]},
    )
