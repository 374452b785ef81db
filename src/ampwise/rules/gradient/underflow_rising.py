"""Gradients that approach FP16's lower limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.trend import Point, Series, steady_slope

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP602",
    name="underflow-rising",
    severity=Severity.WARNING,
    summary="Gradients shrink towards the range that FP16 rounds to zero.",
    why=(
        "Gradients that keep halving eventually reach the end of FP16's range, and the scaler compensates only one "
        "doubling per growth interval. Long before anything is lost, the median exponent of a gradient falls linearly "
        "towards the limit, so it can be extrapolated. Reported when the fall continues through all recent samples (a "
        "jump, noise, or a fall that has ended does not count), the first values already have fewer bits, and half of "
        "them would be lost before the run is five times as long as the fall."
    ),
    fix="Raise the loss scale, shorten `growth_interval` so that the scale keeps up, or train in BF16.",
    bad='scaler = torch.amp.GradScaler("cuda", growth_interval=10**9)',
    good='scaler = torch.amp.GradScaler("cuda", growth_interval=500)',
)

FIX_WITHOUT_SCALER = "Use a GradScaler with FP32 parameters under autocast, or train in BF16."
TOUCHED = 0.02  # of the values subnormal or lost: below that there is no visible effect yet
FALLEN = 1.0  # powers of two, at least: less is batch noise
HORIZON = 4.0  # times the length of the observed fall: no extrapolation beyond that
LEAST = 64  # values


@dataclass(frozen=True, slots=True)
class _Fall:
    slope: float  # powers of two per step
    half_lost: int  # step


def check(health: GradientHealth) -> Iterator[Finding]:
    if health.precision != "fp16":
        return
    falls = {
        name: fall
        for name, found in health.underflows.items()
        if found.share >= TOUCHED and found.values >= LEAST and (fall := _fall(health.margins.get(name)))
    }
    if not falls:
        return
    first = min(falls, key=lambda name: falls[name].half_lost)
    fall, found, last = falls[first], health.underflows[first], health.recent[-1].last
    others = f" (and {len(falls) - 1} more parameters shrink)" if len(falls) > 1 else ""
    when = "already" if fall.half_lost <= last else f"by step {fall.half_lost}"
    yield RULE.at(
        Place(parameter=first, step=last),
        f"the gradient halves every {-1 / fall.slope:.3g} steps: {found.share:.0%} of it is too small for full FP16 "
        f"precision, and half will be lost {when} if this continues{others}",
        evidence={
            "subnormal_or_lost_share": round(found.share, 4),
            "octaves_per_step": fall.slope,
            "half_lost_at_step": fall.half_lost,
            "parameters": len(falls),
        },
        fix=FIX_WITHOUT_SCALER if health.recent[-1].scale is None else None,
    )


def _fall(margins: Series | None) -> _Fall | None:
    """Return the latest fall that is still going on, or one over the whole run."""
    if margins is None:
        return None
    return _steady_fall(margins.recent) or _steady_fall(margins.points)


def _steady_fall(points: list[Point]) -> _Fall | None:
    slope = steady_slope(points)
    if slope is None or slope >= 0:
        return None
    now, watched = points[-1], points[-1].last - points[0].first
    if -slope * watched < FALLEN:
        return None
    to_go = now.mean / -slope
    return _Fall(slope, round(now.last + to_go)) if to_go <= HORIZON * watched else None
