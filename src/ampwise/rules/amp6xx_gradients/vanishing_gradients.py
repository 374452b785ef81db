from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.rules.amp6xx_gradients.trends import depth_change

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP605",
    name="vanishing-gradients",
    severity=Severity.WARNING,
    summary="Gradients shrink by a factor of ten thousand or more from the last layers to the first.",
    why=(
        "Each layer that attenuates the gradient makes it smaller for the layers before it; over many layers the first "
        "ones hardly learn, and in FP16 they underflow first. Measured as the RMS of each weight's gradient: the "
        "median of the first quarter of the layers against that of the last, if each quarter has its part in the fall."
    ),
    fix="Use residual connections or normalisation, an activation that does not saturate, or another initialisation.",
    consequence_of=("AMP640",),
    bad="layers = [nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(20)]",
    good="layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(20)]",
)

FALL = 1e4  # healthy networks stay within a few hundred, with or without normalisation


def check_gradients(health: GradientHealth) -> Findings:
    layer, found = depth_change(health)
    if layer is not None and found["ratio"] * FALL <= 1:
        yield RULE.at(
            Place(parameter=layer, step=health.recent[-1].last),
            f"gradients shrink by a factor of {1 / found['ratio']:.1e} from the output to the input across "
            f"{found['weights']} weights: the first layers hardly learn",
            evidence=found,
        )
