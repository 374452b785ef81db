"""Runs made up by hand, to plant faults in."""

import numpy as np

from ampwise.finding.registry import run_checks
from ampwise.numbers.census.algebra import Census
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.watch.findings import Findings
from ampwise.watch.gradient_health import GradientHealth

NAMES = [f"layers.{layer}.{kind}" for layer in range(8) for kind in ("weight", "bias")]


def census_of(values):
    """By its definition, in FP64."""
    values = np.asarray(values, np.float64)
    finite = values[np.isfinite(values)]
    magnitudes = np.abs(finite[finite != 0])
    exponents, counts = np.unique(np.ceil(np.log2(magnitudes)).astype(int) - 1, return_counts=True)
    return Census(
        binades=dict(zip(exponents.tolist(), counts.tolist(), strict=True)),
        zeros=int((values == 0).sum()),
        infs=int(np.isinf(values).sum()),
        nans=int(np.isnan(values).sum()),
        amax=float(magnitudes.max(initial=0.0)),
        amin=float(magnitudes.min()) if magnitudes.size else 0.0,
        sum_squares=float((magnitudes**2).sum()),
    )


def through_fp16(gradient, scale):
    """What an FP16 backward pass leaves of a gradient, in true units."""
    return (np.asarray(gradient) * scale).astype(np.float16).astype(np.float64) / scale


def sample_of(step, gradients, scale=65536.0, fp16=True):
    scaled = {name: through_fp16(g, scale or 1.0) if fp16 else g for name, g in gradients.items()}
    layers = {name: census_of(gradient) for name, gradient in scaled.items()}
    return LayerSample(first=step, last=step, scale=scale, layers=layers)


def gradients(rng, size=1e-3, n=400, names=NAMES):
    return {name: rng.normal(0, size, n) for name in names}


def sampled(gradients_at, samples=10, scale=65536.0, precision="fp16", every=10, names=NAMES, **settings):
    """A run whose samples hold ``gradients_at(number)``; scale may be a function of the number too."""
    health = GradientHealth(precision=precision, names=names, **settings)
    for number in range(samples):
        at = scale(number) if callable(scale) else scale
        health.add_sample(sample_of((number + 1) * every, gradients_at(number), at, fp16=precision == "fp16"))
    return health


def stepped(rows, precision="fp16", **settings):
    """A run of steps, each a dict for its row."""
    health = GradientHealth(precision=precision, names=NAMES, **settings)
    for step, row in enumerate(rows, start=1):
        health.add_step(StepRow(step=step, **{"loss": 1.0, "norm": 1.0, **row}))
    return health


def scaler_rows(overflows, steps, init_scale=65536.0, growth_interval=2000, growth_factor=2.0, backoff_factor=0.5):
    """The rows of torch's rule, where ``overflows(step, scale)`` says which steps are not finite."""
    scale, clean = init_scale, 0
    for step in range(1, steps + 1):
        skipped = overflows(step, scale)
        yield {"scale": scale, "skipped": skipped, "norm": float("inf") if skipped else 1.0}
        clean = 0 if skipped else clean + 1
        if skipped:
            scale *= backoff_factor
        elif clean == growth_interval:
            scale, clean = scale * growth_factor, 0


def judged(health):
    """What a run makes of it: findings with their counts, judged twice as a growing run is."""
    found = Findings()
    for _ in range(2):
        found.judge_whole(health)
    return {each.finding.rule.code: each for each in found}


def findings(health):
    """What all rules about gradients say, by code."""
    found = {}
    for finding in run_checks(health):
        assert "\n" not in finding.message
        assert None not in finding.evidence.values()
        assert type(finding.evidence.get("times", 1)) is int, "a run takes it for the finding's count"
        found.setdefault(finding.rule.code, []).append(finding)
    return found
