"""Gradients that come nearer to FP16's lower end, sample after sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.evidence.health import Health
from ampwise.evidence.trend import Point, Series, steady_slope
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP602",
    name="underflow-rising",
    severity=Severity.WARNING,
    summary="Gradients shrink towards the values that FP16 turns to zero.",
    why=(
        "Gradients that halve again and again reach the end of FP16's range sooner or later, and the scaler follows "
        "only one doubling in each growth interval. Long before anything is lost, the median of a gradient moves "
        "towards the limit in even steps of its exponent: a line that can be drawn on. Reported when the fall goes on "
        "through all of the last samples (a jump, noise, or a fall that has ended does not count), the first values "
        "have fewer bits already, and half of them would be lost before the run is five times as long as the fall."
    ),
    fix="Raise the loss scale, shorten `growth_interval` so that it follows, or train in BF16.",
    bad='scaler = torch.amp.GradScaler("cuda", growth_interval=10**9)',
    good='scaler = torch.amp.GradScaler("cuda", growth_interval=500)',
)

FIX_WITHOUT_SCALER = "Use a GradScaler with FP32 parameters, under autocast; or train in BF16."
TOUCHED = 0.02  # of the values subnormal or lost: before, there is nothing to be seen of it yet
FALLEN = 1.0  # powers of two, at least: less is what the noise of batches does
HORIZON = 4.0  # times as long as the fall was watched; further no line should be drawn
LEAST = 64  # values


@dataclass(frozen=True, slots=True)
class _Fall:
    slope: float  # powers of two a step
    half_lost: int  # step


def check(health: Health) -> Iterator[Finding]:
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
        f"the gradient halves every {-1 / fall.slope:.3g} steps: {found.share:.0%} of it is too small for all of "
        f"FP16's bits, and half will be lost {when} if this goes on{others}",
        evidence={
            "subnormal_or_lost_share": round(found.share, 4),
            "octaves_per_step": fall.slope,
            "half_lost_at_step": fall.half_lost,
            "parameters": len(falls),
        },
        fix=FIX_WITHOUT_SCALER if health.recent[-1].scale is None else None,
    )


def _fall(margins: Series | None) -> _Fall | None:
    """The latest fall that is still going on, or one over the whole run."""
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
