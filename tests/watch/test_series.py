"""Series stay short; a steady change is told from a jump; what underflows completely still counts."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import FLUSHED
from ampwise.rules.amp6xx_gradients import gradient_underflow
from ampwise.rules.amp6xx_gradients.trends import steady_quarters
from ampwise.runs.rows import LayerSample
from ampwise.watch.gradient_health import GradientHealth, Series

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(VALUES, st.integers(1, 8), st.integers(2, 8))
def test_a_series_stays_short_and_keeps_every_nth(values, recent, old):
    series = Series(recent=recent, old=old)
    for point in enumerate(values):
        series.add(*point)
    kept = series.points
    assert len(kept) <= recent + old
    assert kept[-recent:] == list(enumerate(values))[-recent:]
    assert all(values[step] == value for step, value in kept)
    steps = [step for step, _ in kept][: -len(series.recent)]
    assert len({b - a for a, b in itertools.pairwise(steps)}) <= 1
    assert not steps or steps[0] == 0
    assert 2 * len(steps) >= min(old, len(values) - len(series.recent)), "no fewer than needed"


@pytest.mark.parametrize("slope", [-0.3, 0.2])
def test_a_change_that_goes_on_is_found(slope):
    rng = random.Random(2)
    quarters = steady_quarters([slope * x + rng.gauss(0, 0.5) for x in range(24)])
    assert quarters[-1] - quarters[0] == pytest.approx(18 * slope, rel=0.25)


@pytest.mark.parametrize("seed", range(40))
def test_a_jump_or_an_ended_fall_is_none(seed):
    rng = random.Random(seed)
    noise = [rng.gauss(0, 0.3) for _ in range(24)]
    at = rng.randrange(3, 21)
    assert steady_quarters([-8.0 * (x >= at) + noise[x] for x in range(24)]) is None
    assert steady_quarters([-min(x, 6) + noise[x] for x in range(24)]) is None


def test_a_constant_has_no_change():
    assert steady_quarters([1.0] * 12) is None
    assert steady_quarters(range(12)) == [1.0, 4.0, 7.0, 10.0]


def sampled(*binades, scales=None):
    """Samples of one layer with 400 values in one binade each, or None for 400 zeros; another layer is healthy."""
    health = GradientHealth(precision="fp16")
    for step, binade in enumerate(binades):
        tiny = Census(zeros=400)
        if binade is not None:
            tiny = Census(binades={binade: 400}, amax=2.0 ** (binade + 1), amin=2.0**binade)
        layers = {"tiny": tiny, "healthy": Census(binades={-3: 400}, amax=0.2, amin=0.125)}
        scale = scales[step] if scales else 1.0
        health.add_sample(LayerSample(first=step, last=step, scale=scale, layers=layers))
    return health


def test_a_layer_that_underflows_completely_still_counts():
    shrinking = sampled(FLUSHED + 3, FLUSHED + 1, None, None)
    (finding,) = gradient_underflow.check_gradients(shrinking)
    assert finding.place.parameter == "tiny"
    assert finding.evidence["lost_share_at_least"] == 1.0
    fallen_scale = sampled(FLUSHED, None, scales=[2.0**8, 1.0])
    assert fallen_scale.underflows["tiny"].lost == 400
    assert not sampled(None, None).underflows["tiny"].lost, "it may be dead"
    assert not sampled(FLUSHED + 9, None).underflows["tiny"].lost, "it was far from underflow"
    assert not sampled(FLUSHED, None, scales=[1.0, 2.0**10]).underflows["tiny"].lost, "a higher scale would show it"
    assert not sampled(FLUSHED, None, FLUSHED + 12).underflows["tiny"].lost, "it is back"
