"""Gradients that FP16 turns to zero, or keeps with few bits."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.health import Health
from ampwise.evidence.settings import fitting_scale
from ampwise.evidence.wording import scale_text
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP601",
    name="gradient-underflow",
    severity=Severity.WARNING,
    summary="Gradients are too small for FP16, at the loss scale they have or without one.",
    why=(
        "FP16 turns magnitudes up to 2⁻²⁵ to zero and keeps those below 2⁻¹⁴ with fewer bits. The loss scale lifts "
        "gradients above that; where it does not, weights stop learning without a word. Exact zeros alone say little: "
        "a healthy run can have 65% of them, from rows of an embedding that no batch used. So the values just above "
        "the limit are counted, and from how their number falls off towards it follows, as an estimate, how many "
        "were lost below."
    ),
    fix="Start with a higher `init_scale`, or train in BF16, which has FP32's range.",
    bad='scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10**9)',
    good='scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)',
)

LOST = 0.05  # of a parameter's gradient; the estimate may be off by a factor of 2, and below that nobody will notice
FEWER_BITS = 0.5  # then the typical gradient is no longer held as FP16 holds numbers
LEAST = 64  # values, below which a share is chance
NAMED = 3  # parameters in a message
SAMPLES = 3  # in a row, without one value above zero


def check(health: Health) -> Iterator[Finding]:
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


def _all_gone(health: Health) -> bool:
    """Not one value was left, in several samples: the loss cannot be all flat."""
    return health.samples >= SAMPLES and bool(health.values) and health.values == health.zeros


def _nothing_left(health: Health) -> Finding:
    scale = health.recent[-1].scale
    at = "without a loss scale" if scale is None else f"at loss scale {scale_text(scale)}"
    return RULE.at(
        Place(step=health.recent[-1].last),
        f"every gradient of all {len(health.values)} parameters is exactly zero {at}: FP16 has flushed them, or the "
        "loss does not depend on the parameters",
        evidence={"samples": health.samples},
    )


def _fix(health: Health, scale: float | None) -> str:
    fitting = fitting_scale(health)
    if fitting is None or fitting <= (scale or 1.0):
        higher = "a" if scale is None else "a higher"
        return f"Train in BF16: the largest gradients leave no room for {higher} loss scale in FP16."
    if scale is None:
        return (
            f"Use a GradScaler with FP32 parameters, under autocast: `init_scale={scale_text(fitting)}` fits these "
            "gradients; or train in BF16, with FP32's range."
        )
    return f"`GradScaler(init_scale={scale_text(fitting)})` fits these gradients; or train in BF16, with FP32's range."
