"""Series keep their extremes and totals; trends are found in noise and not made up from it."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.rules.evidence.trend import Point, Series, mann_kendall, robust_spread, steady_slope, theil_sen

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


def points(values):
    return [Point(step, step, 1, value, value, value) for step, value in enumerate(values)]


@given(VALUES, st.integers(1, 8), st.integers(2, 8))
def test_a_series_stays_short_and_loses_no_extreme(values, recent, old):
    series = Series(recent=recent, old=old)
    for step, value in enumerate(values):
        series.add(step, value)
    kept = series.points
    assert len(kept) == len(series) <= recent + old
    assert sum(point.count for point in kept) == len(values)
    assert min(point.low for point in kept) == min(values)
    assert max(point.high for point in kept) == max(values)
    assert [point.first for point in kept] == sorted(point.first for point in kept)
    assert all(one.last < other.first for one, other in itertools.pairwise(kept))
    mean = sum(point.mean * point.count for point in kept) / len(values)
    assert mean == pytest.approx(statistics.fmean(values), abs=1e-3)
    assert [point.mean for point in series.recent] == values[-recent:]


def test_old_points_grow_at_the_same_pace():
    series = Series(recent=4, old=16)
    for step in range(10_000):
        series.add(step, 0.0)
    old = series.points[:-4]
    assert max(point.count for point in old[:-2]) <= 4 * min(point.count for point in old[:-2])


@given(st.floats(-5, 5), st.floats(-5, 5), st.lists(st.floats(-100, 100), min_size=3, max_size=30, unique=True))
def test_theil_sen_finds_a_line(slope, start, xs):
    xs = sorted({round(x, 2) for x in xs})
    if len(xs) >= 2:
        assert theil_sen(xs, [start + slope * x for x in xs]) == pytest.approx(slope, abs=1e-6)


def test_theil_sen_is_not_swayed_by_a_quarter_of_odd_points():
    rng = random.Random(0)
    ys = [2.0 * x for x in range(40)]
    for at in rng.sample(range(40), 10):
        ys[at] = rng.choice([-1e6, 1e6])
    assert theil_sen(list(range(40)), ys) == pytest.approx(2.0, rel=0.2)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=40))
def test_mann_kendall_turns_with_the_series(ys):
    assert mann_kendall(ys) == pytest.approx(-mann_kendall(ys[::-1]))
    assert mann_kendall(ys) == mann_kendall([3 * y + 1 for y in ys])


def test_mann_kendall_of_noise_is_standard_normal():
    rng = random.Random(1)
    scores = [mann_kendall([rng.random() for _ in range(20)]) for _ in range(400)]
    assert abs(statistics.fmean(scores)) < 0.15
    assert 0.85 < statistics.pstdev(scores) < 1.1


@pytest.mark.parametrize("slope", [-0.3, 0.2])
def test_a_change_that_goes_on_is_found(slope):
    rng = random.Random(2)
    found = steady_slope(points([slope * x + rng.gauss(0, 0.5) for x in range(24)]))
    assert found == pytest.approx(slope, rel=0.25)


@pytest.mark.parametrize("seed", range(40))
def test_noise_a_jump_or_an_ended_fall_is_none(seed):
    rng = random.Random(seed)
    noise = [rng.gauss(0, 0.3) for _ in range(24)]
    at = rng.randrange(3, 21)
    jump = [-8.0 * (x >= at) + noise[x] for x in range(24)]
    ended = [-min(x, 6) + noise[x] for x in range(24)]
    assert steady_slope(points(noise)) is None
    assert steady_slope(points(jump)) is None
    assert steady_slope(points(ended)) is None


def test_too_few_points_are_no_trend():
    assert steady_slope(points(range(11))) is None
    assert steady_slope(points(range(12))) == 1.0


def test_the_spread_of_a_normal_sample():
    rng = random.Random(3)
    middle, spread = robust_spread([rng.gauss(5, 2) for _ in range(4000)] + [1e9] * 100)
    assert middle == pytest.approx(5, abs=0.2)
    assert spread == pytest.approx(2, rel=0.1)
