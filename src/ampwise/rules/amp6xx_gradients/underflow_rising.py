from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.rules.amp6xx_gradients.trends import steady_quarters

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP602",
    name="underflow-rising",
    severity=Severity.WARNING,
    summary="Gradients shrink towards the range that FP16 rounds to zero.",
    why=(
        "Gradients that keep halving eventually reach the end of FP16's range, and the scaler compensates only one "
        "doubling per growth interval. Long before anything is lost, the median exponent of a gradient falls linearly "
        "towards the limit, so it can be extrapolated. Reported when the medians of four quarters of "
        "the samples fall one after the other and nothing in the last quarter is as high as in the first (so a jump, "
        "noise, or a fall that has ended does not count), the first values already have fewer bits, and half of them "
        "would be lost before the run is five times as long as the fall."
    ),
    fix="Raise the loss scale, shorten `growth_interval` so that the scale keeps up, or train in BF16.",
    bad='scaler = torch.amp.GradScaler("cuda", growth_interval=10**9)',
    good='scaler = torch.amp.GradScaler("cuda", growth_interval=500)',
    consequence_of=("AMP301", "AMP601"),
)

FIX_WITHOUT_SCALER = "Use a GradScaler with FP32 parameters under autocast, or train in BF16."
TOUCHED = 0.02  # of the values subnormal or lost: below that there is no visible effect yet
FALLEN = 1.0  # powers of two, at least: less is batch noise
HORIZON = 4.0  # times the length of the observed fall: no extrapolation beyond that
LEAST = 64  # values
ENOUGH = 12  # samples, so that each quarter has three and its median is not an outlier


def check_gradients(health: GradientHealth) -> Findings:
    if health.precision != "fp16":
        return
    falls = {}  # of each parameter: slope in powers of two per step, and the step at which half is lost
    for name, found in health.underflows.items():
        if found.share >= TOUCHED and found.values >= LEAST and (margins := health.margins.get(name)):
            # The latest fall that is still going on, or one over the whole run.
            fall = _steady_fall([*margins.recent]) or _steady_fall(margins.even)
            if fall is not None:
                falls[name] = fall
    if not falls:
        return
    first = min(falls, key=lambda name: falls[name][1])
    (slope, half_lost), found, last = falls[first], health.underflows[first], health.recent[-1].last
    others = f" (and {len(falls) - 1} more parameters shrink)" if len(falls) > 1 else ""
    when = "is lost" if half_lost <= last else f"will be lost by step {half_lost}"
    yield RULE.at(
        Place(parameter=first, step=last),
        f"this gradient halves every {-1 / slope:.3g} steps: half of it {when} in FP16{others}",
        evidence={
            "subnormal_or_lost_share": round(found.share, 4),
            "octaves_per_step": slope,
            "half_lost_at_step": half_lost,
            "parameters": len(falls),
        },
        fix=FIX_WITHOUT_SCALER if health.recent[-1].scale is None else None,
    )


def _steady_fall(points: list[tuple[int, float]]) -> tuple[float, int] | None:
    """Return the slope of a fall that will not end soon, and the step at which half of the values are lost."""
    steps, margins = zip(*points, strict=True)
    quarters = steady_quarters(margins) if len(points) >= ENOUGH else None
    if quarters is None or quarters[-1] > quarters[0]:
        return None
    ends = [len(points) * part // 4 for part in range(5)]
    if max(margins[ends[3] :]) >= min(margins[: ends[1]]):
        return None
    middles = [(steps[start] + steps[stop - 1]) / 2 for start, stop in pairwise(ends)]
    # The slower of the pace of the whole and that of its later half: a fall that slows down may be ending.
    slope = max((quarters[-1] - quarters[then]) / (middles[-1] - middles[then]) for then in (0, 1))
    watched = steps[-1] - steps[0]
    to_go = quarters[-1] / -slope  # steps from the middle of the last quarter
    fallen = -slope * watched >= FALLEN
    return (slope, round(middles[-1] + to_go)) if fallen and to_go <= HORIZON * watched else None
