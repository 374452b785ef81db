from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.numbers.number_text import scale_text

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP601",
    name="gradient-underflow",
    severity=Severity.WARNING,
    summary="Gradients are too small for FP16 at their loss scale, or without one.",
    why=(
        "FP16 rounds magnitudes up to 2⁻²⁵ to zero and keeps those below 2⁻¹⁴ with fewer bits. Loss scaling lifts "
        "gradients above that; where it does not, weights silently stop learning. Exact zeros alone say little: a "
        "healthy run can have 65% of them, from embedding rows that no batch used. So the values just above the limit "
        "are counted: FP16's smallest number holds what was between 0.5 and 1.5 times it, and at least half as many "
        "were between 0 and 0.5 times it and are lost."
    ),
    fix="Start with a higher `init_scale`, or train in BF16, which has FP32's range.",
    bad='scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10**9)',
    good='scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)',
    consequence_of=("AMP301",),
)

LOST = 0.05  # of a parameter's gradient; less than this is harmless
FEWER_BITS = 0.5  # then the typical gradient has less than full FP16 precision
LEAST = 64  # values: with fewer, the fraction is noise
NAMED = 3  # parameters in a message
SAMPLES = 3  # consecutive samples without a nonzero value


def check_gradients(health: GradientHealth) -> Findings:
    if health.precision != "fp16" or not health.recent:
        return
    step, scale = health.recent[-1].last, health.recent[-1].scale
    at = "without a loss scale" if scale is None else f"at loss scale {scale_text(scale)}"
    if health.samples >= SAMPLES and health.values and health.values == health.zeros:  # no loss is entirely flat
        yield RULE.at(
            Place(step=step),
            f"every gradient is exactly zero {at}: they underflow in FP16, or the loss does not use the parameters",
            evidence={"samples": health.samples},
        )
        return
    hit = {
        name: found
        for name, found in health.underflows.items()
        if found.values >= LEAST and (found.lost_share >= LOST or found.subnormal_share >= FEWER_BITS)
    }
    if not hit:
        return
    worst = max(hit, key=lambda name: (hit[name].lost_share, hit[name].subnormal_share))
    found = hit[worst]
    others = f" (and {len(hit) - 1} more parameters)" if len(hit) > 1 else ""
    # A share below half a per cent would read as 0%.
    lost = f"flushes at least {found.lost_share:.0%} of this gradient to zero" if found.lost_share >= 0.005 else ""
    of = "of it" if lost else "of this gradient"
    short = f"stores {found.subnormal_share:.0%} {of} with fewer bits" if found.subnormal_share >= 0.005 else ""
    fitting, bf16 = health.fitting_scale(), "or train in BF16, which has FP32's range."
    if fitting is None or fitting <= (scale or 1.0):
        higher = "a" if scale is None else "a higher"
        fix = f"Train in BF16: the largest gradients do not allow {higher} loss scale in FP16."
    elif scale is None:
        suits = f"`init_scale={scale_text(fitting)}` suits these gradients"
        fix = f"Use a GradScaler with FP32 parameters under autocast ({suits}), {bf16}"
    else:
        fix = f"Use `GradScaler(init_scale={scale_text(fitting)})`, which suits these gradients, {bf16}"
    yield RULE.at(
        Place(parameter=worst, step=step),
        f"FP16 {' and '.join(filter(None, [lost, short]))} {at}{others}",
        evidence={
            "lost_share_at_least": round(found.lost_share, 4),
            "subnormal_share": round(found.subnormal_share, 4),
            "parameters": len(hit),
            "of": len(health.underflows),
            "worst": sorted(hit, key=lambda name: -hit[name].lost_share)[:NAMED],
        },
        fix=fix,
    )
