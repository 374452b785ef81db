"""Suggested settings follow from the counts, and are silent where nothing is to be said."""

import math

import pytest

from ampwise.numbers.census.algebra import Census
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.watch.gradient_health import GradientHealth, suggested_settings


def run(overflows, steps=100, init_scale=65536.0, growth_interval=2000, growth_factor=2.0):
    health = GradientHealth(precision="fp16", growth_interval=growth_interval)
    scale, clean = init_scale, 0
    for step in range(1, steps + 1):
        skipped = overflows(step, scale)
        health.add_step(StepRow(step=step, loss=1.0, norm=50.0, scale=scale, skipped=skipped))
        clean = 0 if skipped else clean + 1
        if skipped:
            scale /= 2
        elif clean % growth_interval == 0:
            scale *= growth_factor
    return health


def samples(health, binades, amax, zeros=0, scale=1.0):
    census = Census(binades=binades, zeros=zeros, amax=amax, amin=math.ldexp(1.5, min(binades)))
    for step in range(5):
        health.add_sample(LayerSample(first=step, last=step, scale=scale, layers={"w": census}))


def test_a_long_search_is_answered_by_where_it_settled():
    settings = suggested_settings(run(lambda step, scale: scale > 2.0**18, init_scale=2.0**24))
    reason = "6 of the first steps were skipped while the scale fell from 2**24 to 262144"
    assert settings == {"init_scale": (2.0**18, reason)}


def test_a_short_search_is_not_worth_a_word():
    assert suggested_settings(run(lambda step, scale: scale > 2.0**14)) == {}


def test_lost_gradients_are_answered_by_a_higher_start_with_headroom():
    health = run(lambda step, scale: False, init_scale=1.0)
    samples(health, {-25: 300, -24: 300, -23: 400, -22: 500, -21: 500, -20: 500, -8: 1}, 2.0**-7.5, zeros=10_000)
    ((init_scale, reason),) = suggested_settings(health).values()
    k = math.log2(init_scale)
    assert k == int(k) >= 10
    assert init_scale * 2.0**-7.5 * 4 <= 65504
    assert reason.startswith("at least ")


def test_a_fitting_scale_needs_samples():
    assert GradientHealth(precision="fp16").fitting_scale() is None


def test_one_wild_sample_in_many_does_not_decide():
    health = GradientHealth(precision="fp16")
    for step in range(200):
        amax = 1e4 if step == 60 else 1e-3
        exponent = math.ceil(math.log2(amax)) - 1
        census = Census(binades={exponent: 10, -40: 10}, amax=amax, amin=1.5 * 2.0**-40)
        health.add_sample(LayerSample(first=step, last=step, scale=1.0, layers={"w": census}))
    assert health.fitting_scale() >= 2.0**20


def test_oscillation_is_answered_by_a_longer_interval():
    settings = suggested_settings(run(lambda step, scale: scale > 65536, 300, growth_interval=2))
    ((name, (value, reason)),) = settings.items()
    assert (name, value) == ("growth_interval", 2000)
    assert "increases overflowed immediately" in reason


def test_overflows_that_take_several_skips_are_answered_by_a_faster_backoff():
    health = run(lambda step, scale: scale > 65536, 2000, growth_interval=100, growth_factor=2.0**4)
    reason = "an overflow usually takes 4 skipped steps until the scale is low enough"
    assert suggested_settings(health)["backoff_factor"] == (0.5**4, reason)


@pytest.mark.parametrize("overflows", [lambda step, scale: False, lambda step, scale: scale > 2.0**16])
def test_a_healthy_run_keeps_its_settings(overflows):
    assert suggested_settings(run(overflows, 5000)) == {}


def test_without_a_scaler_or_with_something_broken_settings_are_not_the_matter():
    health = GradientHealth(precision="bf16")
    health.add_step(StepRow(step=1, loss=1.0, norm=1.0))
    assert suggested_settings(health) == {}
    assert suggested_settings(run(lambda step, scale: step > 20)) == {}


def test_large_gradients_of_the_whole_run_keep_their_headroom():
    health = GradientHealth(precision="fp16")
    for step in range(60):
        amax = 0.75 if step < 50 else 1.5 * 2.0**-11
        census = Census(binades={math.ceil(math.log2(amax)) - 1: 10, -40: 10}, amax=amax, amin=1.5 * 2.0**-40)
        health.add_sample(LayerSample(first=step, last=step, scale=1.0, layers={"w": census}))
    assert 65504 / 8 < health.fitting_scale() * 0.75 * 4 <= 65504
