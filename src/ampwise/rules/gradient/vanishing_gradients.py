"""Gradients that shrink from the output of a model to its input."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.depth import depth
from ampwise.evidence.health import Health
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP605",
    name="vanishing-gradients",
    severity=Severity.WARNING,
    summary="Gradients shrink ten thousand times or more from the last layers to the first.",
    why=(
        "Each layer that passes on less than it gets makes the gradient of those before it smaller; over many layers "
        "the first ones hardly learn, and in FP16 they are the first to be flushed to zero. Measured as the root of "
        "the mean square of each weight's gradient, the median of the first quarter of the layers against that of "
        "the last, where it falls along the whole depth."
    ),
    fix="Use residual connections or normalisation, an activation that does not saturate, another initialisation.",
    bad="layers = [nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(20)]",
    good="layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(20)]",
)

FALL = 1e4  # healthy nets stay within some hundreds, with normalisation or without


def check(health: Health) -> Iterator[Finding]:
    found = depth(health)
    if found is None or found.steady > 0 or found.ratio * FALL > 1:
        return
    yield RULE.at(
        Place(parameter=found.first_layer, step=health.recent[-1].last),
        f"gradients fall {1 / found.ratio:.1e} times from the output to the input over {found.layers} weights: "
        "the first layers hardly learn",
        evidence={"first_rms": found.first, "last_rms": found.last, "ratio": found.ratio, "weights": found.layers},
    )
