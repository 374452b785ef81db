"""A few large gradients that keep the loss scale too low for all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from ampwise.census.algebra import Census
from ampwise.evidence.health import Health
from ampwise.evidence.underflow import NOTHING
from ampwise.evidence.wording import scale_text
from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.formats import find_scalar_format

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP603",
    name="gradient-near-overflow",
    severity=Severity.WARNING,
    summary="Gradients near FP16's largest number hold the loss scale down, or have no scaler to catch an overflow.",
    why=(
        "A scaler raises its scale until something overflows, so that the largest gradient is always within a few "
        "doublings of 65504: that alone is by design. It is a fault when one or a few parameters, hundreds of times "
        "larger than all others, decide the scale, and the others pay for it: their small values fall off FP16's "
        "lower end, or the scale is at 1 or below, where it does nothing. And without a scaler nothing catches the "
        "overflow when it comes."
    ),
    fix="Look at these layers: a sum where a mean is meant, a missing normalisation; or run them in FP32.",
    bad='loss = F.mse_loss(output, target, reduction="sum")',
    good="loss = F.mse_loss(output, target)",
)

FIX_WITHOUT_SCALER = (
    "Use a GradScaler with FP32 parameters, under autocast, or train in BF16; and look at these layers: a sum where a "
    "mean is meant, a missing normalisation."
)
NEAR = 4.0  # two doublings below the largest number
APART = 2.0**8  # times the largest of the rest: the scale could be so much higher without them
FEW = 0.1  # of the parameters
PAYING = 0.05  # of the rest's values too small at this scale
IDLE_SCALE = 1.0
SAMPLES = 3  # before it is said


def check(health: Health) -> Iterator[Finding]:
    if health.precision != "fp16" or len(health.recent) < SAMPLES:
        return
    layers = {name: census for name, census in health.recent_layers.items() if census.amax}
    scale = health.recent[-1].scale
    near = {name: census for name, census in layers.items() if _is_near(health, name)}
    if not near:
        return
    if scale is None:
        yield _finding(health, near, layers, "and there is no scaler to skip a step that overflows")
    elif cost := _cost_to_the_rest(health, layers, near, scale):
        yield _finding(health, near, layers, cost)


def _is_near(health: Health, name: str) -> bool:
    """In most of the last samples, not in one by chance."""
    limit = find_scalar_format("fp16").max / NEAR
    scaled = [sample.layers[name].amax * (sample.scale or 1.0) for sample in health.recent if name in sample.layers]
    return len(scaled) >= SAMPLES and median(scaled) >= limit


def _cost_to_the_rest(
    health: Health, layers: Mapping[str, Census], near: Mapping[str, Census], scale: float
) -> str | None:
    rest = [name for name in layers if name not in near]
    if not rest or len(near) > max(1, FEW * len(layers)):
        return None
    times = min(census.amax for census in near.values()) / max(layers[name].amax for name in rest)
    if times < APART:
        return None
    if scale <= IDLE_SCALE:
        return (
            f"which holds the loss scale at {scale_text(scale)}; without it the scale could be {times:.0f} times higher"
        )
    total = sum((health.underflows.get(name, NOTHING) for name in rest), start=NOTHING)
    if total.share < PAYING:
        return None
    return (
        f"{times:.0f} times the largest of the others, of which {total.share:.0%} is too small for all of FP16's bits "
        "at this scale"
    )


def _finding(health: Health, near: Mapping[str, Census], layers: Mapping[str, Census], cost: str) -> Finding:
    worst = max(near, key=lambda name: near[name].amax)
    sample = health.recent[-1]
    others = f" (and {len(near) - 1} more parameters)" if len(near) > 1 else ""
    at = "" if sample.scale is None else f" times the loss scale {scale_text(sample.scale)}"
    return RULE.at(
        Place(parameter=worst, step=sample.last),
        f"the gradient reaches {near[worst].amax:.3g}{at}, near FP16's 65504{others}, {cost}",
        evidence={
            "amax": near[worst].amax,
            "near": sorted(near, key=lambda name: -near[name].amax)[:3],
            "parameters": len(near),
            "of": len(layers),
        },
        fix=FIX_WITHOUT_SCALER if sample.scale is None else None,
    )
