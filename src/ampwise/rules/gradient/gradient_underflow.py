"""Gradients that FP16 rounds to zero, or keeps with few bits."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.number_text import scale_text
from ampwise.rules.evidence.scaler_settings import fitting_scale

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP601",
    name="gradient-underflow",
    severity=Severity.WARNING,
    summary="Gradients are too small for FP16 at their loss scale, or without one.",
    why=(
        "FP16 rounds magnitudes up to 2⁻²⁵ to zero and keeps those below 2⁻¹⁴ with fewer bits. Loss scaling lifts "
        "gradients above that; where it does not, weights silently stop learning. Exact zeros alone say little: a "
        "healthy run can have 65% of them, from embedding rows that no batch used. So the values just above the limit "
        "are counted, and the number lost below it is estimated from how the counts fall off towards it."
    ),
    fix="Start with a higher `init_scale`, or train in BF16, which has FP32's range.",
    bad='scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10**9)',
    good='scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)',
)

LOST = 0.05  # of a parameter's gradient; the estimate may be off by a factor of 2, and less than this is harmless
FEWER_BITS = 0.5  # then the typical gradient has less than full FP16 precision
LEAST = 64  # values: with fewer, the fraction is noise
NAMED = 3  # parameters in a message
SAMPLES = 3  # consecutive samples without a nonzero value


def check(health: GradientHealth) -> Iterator[Finding]:
    if health.precision != "fp16":
        return
    if _all_gone(health):
        yield _nothing_left(health)
        return
    hit = {
        name: found
        for name, found in health.underflows.items()
        if found.values >= LEAST and (found.lost_share >= LOST or found.subnormal_share >= FEWER_BITS)
    }
    if not hit:
        return
    worst = max(hit, key=lambda name: (hit[name].lost_share, hit[name].subnormal_share))
    found, scale = hit[worst], health.recent[-1].scale
    others = f" (and in {len(hit) - 1} more)" if len(hit) > 1 else ""
    lost = f"loses about {found.lost_share:.0%} of this gradient" if found.lost_share >= 0.005 else ""
    short = f"keeps {found.subnormal_share:.0%} {'of it' if lost else 'of this gradient'} with fewer bits"
    at = "without a loss scale" if scale is None else f"at loss scale {scale_text(scale)}"
    yield RULE.at(
        Place(parameter=worst, step=health.recent[-1].last),
        f"FP16 {' and '.join(filter(None, [lost, short]))} {at}{others}",
        evidence={
            "lost_share_estimated": round(found.lost_share, 4),
            "subnormal_share": round(found.subnormal_share, 4),
            "parameters": len(hit),
            "of": len(health.underflows),
            "worst": sorted(hit, key=lambda name: -hit[name].lost_share)[:NAMED],
        },
        fix=_fix(health, scale),
    )


def _all_gone(health: GradientHealth) -> bool:
    """Return whether every value was zero in several samples: the loss cannot be entirely flat."""
    return health.samples >= SAMPLES and bool(health.values) and health.values == health.zeros


def _nothing_left(health: GradientHealth) -> Finding:
    scale = health.recent[-1].scale
    at = "without a loss scale" if scale is None else f"at loss scale {scale_text(scale)}"
    return RULE.at(
        Place(step=health.recent[-1].last),
        f"every gradient of all {len(health.values)} parameters is exactly zero {at}: they underflow in FP16, or the "
        "loss does not depend on the parameters",
        evidence={"samples": health.samples},
    )


def _fix(health: GradientHealth, scale: float | None) -> str:
    fitting = fitting_scale(health)
    if fitting is None or fitting <= (scale or 1.0):
        higher = "a" if scale is None else "a higher"
        return f"Train in BF16: the largest gradients do not allow {higher} loss scale in FP16."
    if scale is None:
        return (
            f"Use a GradScaler with FP32 parameters under autocast (`init_scale={scale_text(fitting)}` suits these "
            "gradients), or train in BF16, which has FP32's range."
        )
    return (
        f"Use `GradScaler(init_scale={scale_text(fitting)})`, which suits these gradients, or train in BF16, which "
        "has FP32's range."
    )
