"""A few large gradients that keep the loss scale too low for all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.formats import find_scalar_format
from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.number_text import scale_text
from ampwise.rules.evidence.underflow import NOTHING

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP603",
    name="gradient-near-overflow",
    severity=Severity.WARNING,
    summary="Gradients near FP16's maximum keep the loss scale low, or have no scaler to catch an overflow.",
    why=(
        "A scaler raises its scale until something overflows, so the largest gradient is always within a few "
        "doublings of 65504: that is by design. It is a problem when one or a few parameters, hundreds of times "
        "larger than all others, determine the scale at the others' expense: their small values underflow, or the "
        "scale is at 1 or below, where it has no effect. And without a scaler nothing catches the overflow when it "
        "happens."
    ),
    fix="Check these layers for a sum that should be a mean or a missing normalisation, or run them in FP32.",
    bad='loss = F.mse_loss(output, target, reduction="sum")',
    good="loss = F.mse_loss(output, target)",
)

FIX_WITHOUT_SCALER = (
    "Use a GradScaler with FP32 parameters under autocast, or train in BF16; and check these layers for a sum that "
    "should be a mean or a missing normalisation."
)
NEAR = 4.0  # two doublings below the maximum
APART = 2.0**8  # times the largest of the other gradients: the scale could be that much higher without them
FEW = 0.1  # of the parameters
PAYING = 0.05  # of the other parameters' values too small at this scale
IDLE_SCALE = 1.0
SAMPLES = 3  # needed before reporting


def check(health: GradientHealth) -> Iterator[Finding]:
    if health.precision != "fp16" or len(health.recent) < SAMPLES:
        return
    layers = {name: census for name, census in health.recent_layers.items() if census.amax}
    scale = health.recent[-1].scale
    near = {name: census for name, census in layers.items() if _is_near(health, name)}
    if not near:
        return
    if scale is None:
        yield _finding(health, near, layers, "and there is no scaler to skip a step that overflows")
    elif cost := _cost_to_others(health, layers, near, scale):
        yield _finding(health, near, layers, cost)


def _is_near(health: GradientHealth, name: str) -> bool:
    """Return whether the gradient is near the limit in most recent samples, not just in one."""
    limit = find_scalar_format("fp16").max / NEAR
    scaled = [sample.layers[name].amax * (sample.scale or 1.0) for sample in health.recent if name in sample.layers]
    return len(scaled) >= SAMPLES and median(scaled) >= limit


def _cost_to_others(
    health: GradientHealth, layers: Mapping[str, Census], near: Mapping[str, Census], scale: float
) -> str | None:
    others = [name for name in layers if name not in near]
    if not others or len(near) > max(1, FEW * len(layers)):
        return None
    times = min(census.amax for census in near.values()) / max(layers[name].amax for name in others)
    if times < APART:
        return None
    if scale <= IDLE_SCALE:
        return (
            f"which keeps the loss scale at {scale_text(scale)}; without it the scale could be {times:.0f} times higher"
        )
    total = sum((health.underflows.get(name, NOTHING) for name in others), start=NOTHING)
    if total.share < PAYING:
        return None
    return (
        f"{times:.0f} times the largest of the others, {total.share:.0%} of which are too small for full FP16 "
        "precision at this scale"
    )


def _finding(health: GradientHealth, near: Mapping[str, Census], layers: Mapping[str, Census], cost: str) -> Finding:
    worst = max(near, key=lambda name: near[name].amax)
    sample = health.recent[-1]
    others = f" (and {len(near) - 1} more parameters)" if len(near) > 1 else ""
    at = "" if sample.scale is None else f" times the loss scale {scale_text(sample.scale)}"
    return RULE.at(
        Place(parameter=worst, step=sample.last),
        f"the gradient reaches {near[worst].amax:.3g}{at}, close to FP16's maximum of 65504{others}, {cost}",
        evidence={
            "amax": near[worst].amax,
            "near": sorted(near, key=lambda name: -near[name].amax)[:3],
            "parameters": len(near),
            "of": len(layers),
        },
        fix=FIX_WITHOUT_SCALER if sample.scale is None else None,
    )
