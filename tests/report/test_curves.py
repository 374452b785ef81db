"""Thinning keeps what matters; axes hold what they show."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.record.bucket import Bucket
from ampwise.record.rows import StepRow
from ampwise.report.axis import axis_for, round_numbers
from ampwise.report.curves import METRICS, by_optimizer, plain, spread_of, thinned

ROWS = st.lists(
    st.builds(
        StepRow,
        optimizer=st.integers(0, 2),
        step=st.integers(1, 10_000),
        loss=st.none() | st.floats(),
        norm=st.none() | st.floats(min_value=0),
        skipped=st.booleans(),
    ),
    max_size=60,
    unique_by=lambda row: (row.optimizer, row.step),
)


@given(ROWS, st.integers(1, 20))
def test_nothing_that_matters_is_lost(rows, most):
    buckets = [Bucket.of(row) for row in rows]
    thin = thinned(buckets, most)
    for optimizer, line in by_optimizer(buckets).items():
        kept = by_optimizer(thin)[optimizer]
        assert len(kept) <= most
        assert sum(one.count for one in kept) == len(line)
        assert sum(one.skipped for one in kept) == sum(one.skipped for one in line)
        assert all(before.last < after.first for before, after in itertools.pairwise(kept))
        for metric in METRICS:
            before, after = ([spread_of(one, metric) for one in some] for some in (line, kept))
            assert sum(spread.bad for spread in after) == sum(spread.bad for spread in before)
            for end, extreme in (("low", min), ("high", max)):
                ends = [[getattr(s, end) for s in some if getattr(s, end) is not None] for some in (before, after)]
                assert extreme(ends[0], default=None) == extreme(ends[1], default=None)


def test_few_steps_stay_as_they_are(make_steps):
    assert thinned(make_steps(9), 9) == make_steps(9)


def test_unknown_is_none_and_not_finite_is_counted():
    row = plain(Bucket.of(StepRow(step=3, loss=float("inf"))))
    assert row["norm"] is None
    assert row["loss"] == {"low": None, "mean": None, "high": None, "not_finite": 1}
    assert row["first"] == row["last"] == 3


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.booleans())
def test_an_axis_holds_its_values_and_its_ticks(values, always):
    axis = axis_for(values, always=always)
    assert all(0 <= axis.share(value) <= 1 for value in values)
    ticks = axis.ticks()
    assert len(ticks) <= 8
    assert all(-1e-6 <= axis.share(tick) <= 1 + 1e-6 for tick, _ in ticks)


def test_the_scale_has_powers_of_two():
    axis = axis_for([1024.0, 65536.0], base=2, always=True)
    assert [label for _, label in axis.ticks()] == ["2^10", "2^12", "2^14", "2^16"]
    assert axis_for([0.0, 65536.0], base=2, always=True).base == 0  # a collapsed scale has no logarithm


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9))
def test_round_numbers_are_few_inside_and_round(low, width):
    found = round_numbers(low, low + width)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-6 * width <= number <= low + width * (1 + 1e-6) for number in found)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (5.0, 5.0)])
def test_round_numbers_of_a_point(low, high):
    assert round_numbers(low, high) == [low]
    assert math.isfinite(axis_for([low]).share(low))
