from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.numbers.census.underflow import NO_UNDERFLOW
from ampwise.numbers.formats import find_scalar_format
from ampwise.numbers.number_text import scale_text

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP603",
    name="gradient-near-overflow",
    severity=Severity.WARNING,
    summary="Gradients near FP16's maximum keep the loss scale low, or have no scaler to catch an overflow.",
    why=(
        "A scaler raises its scale until something overflows, so the largest gradient is always within a few doublings "
        "of 65504: that is by design. It is a problem when one or a few parameters, hundreds of times larger than all "
        "others, determine the scale at the others' expense: their small values underflow, or the scale is at 1 or "
        "below, where it has no effect. And without a scaler nothing catches the overflow."
    ),
    fix="Check these layers for a sum that should be a mean or a missing normalisation, or run them in FP32.",
    bad='loss = F.mse_loss(output, target, reduction="sum")',
    good="loss = F.mse_loss(output, target)",
    consequence_of=("AMP301",),
)

FIX_WITHOUT_SCALER = (
    "Use a GradScaler with FP32 parameters under autocast, or train in BF16; and check these layers for a sum that "
    "should be a mean or a missing normalisation."
)
NEAR = 4.0  # two doublings below the maximum
APART = 2.0**8  # times the largest of the other gradients: the scale could be that much higher without them
FEW = 0.1  # of the parameters
PAYING = 0.05  # of the other parameters' values too small at this scale
SAMPLES = 3  # needed before reporting


def check_gradients(health: GradientHealth) -> Findings:
    if health.precision != "fp16" or len(health.recent) < SAMPLES:
        return
    sizes = {name: census.amax for name, census in health.recent_layers.items() if census.amax}
    limit, near = find_scalar_format("fp16").max / NEAR, []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        # In most recent samples, not just in one.
        scaled = [sample.layers[name].amax * (sample.scale or 1.0) for sample in health.recent if name in sample.layers]
        if len(scaled) >= SAMPLES and median(scaled) >= limit:
            near.append(name)
    if not near:
        return
    scale = health.recent[-1].scale
    if scale is None:
        at, cost = "", "no scaler skips a step that overflows"
    else:
        at, cost = f" times the loss scale {scale_text(scale)}", _cost_to_others(health, sizes, near, scale)
    if not cost:
        return
    yield RULE.at(
        Place(parameter=near[0], step=health.recent[-1].last),
        f"this gradient reaches {sizes[near[0]]:.3g}{at}, near FP16's maximum of 65504: {cost}",
        evidence={"amax": sizes[near[0]], "near": near[:3], "parameters": len(near), "of": len(sizes)},
        fix=FIX_WITHOUT_SCALER if scale is None else None,
    )


def _cost_to_others(health: GradientHealth, sizes: dict[str, float], near: list[str], scale: float) -> str:
    """Return what keeping the scale low for a few large gradients costs all others; "" if it is little."""
    others = [name for name in sizes if name not in near]
    if not others or len(near) > max(1, FEW * len(sizes)):
        return ""
    times = sizes[near[-1]] / max(sizes[name] for name in others)
    if times < APART:
        return ""
    if scale <= 1:
        return f"it keeps the scale at {scale_text(scale)}, which could be {times:.0f} times higher"
    share = sum((health.underflows.get(name, NO_UNDERFLOW) for name in others), start=NO_UNDERFLOW).share
    if share < PAYING:
        return ""
    return f"{times:.0f} times the others, {share:.0%} of which are too small at this scale"
