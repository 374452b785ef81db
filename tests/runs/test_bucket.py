"""Several steps as one: what a bucket keeps of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.runs.rows import NO_STATS, NumberStats, StepBucket, merge_buckets

from .record_toys import numbers, row, runs_of_rows

values = st.lists(numbers, min_size=1, max_size=20)


@given(values)
def test_extremes_mean_and_what_is_not_finite_are_those_of_the_values(values):
    spread = NumberStats.over([NumberStats.of(value) for value in values])
    known = [value for value in values if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    assert (spread.low, spread.high) == (min(finite, default=None), max(finite, default=None))
    assert (spread.finite, spread.known) == (len(finite), len(known))
    assert spread.nans == sum(map(math.isnan, known))
    assert (spread.infs, spread.negative_infs) == (known.count(math.inf), known.count(-math.inf))
    if finite and max(map(abs, finite)) < 1e300:
        assert spread.mean == pytest.approx(
            math.fsum(finite) / len(finite), rel=1e-9, abs=max(1e-9 * max(map(abs, finite)), 1e-300)
        )
    assert not finite or spread.low <= spread.mean <= spread.high


@given(values, st.data())
def test_it_does_not_matter_how_they_were_grouped(values, data):
    parts = [NumberStats.of(value) for value in values]
    cut = data.draw(st.integers(0, len(parts)))
    groups = [NumberStats.over(group) for group in (parts[:cut], parts[cut:]) if group]
    one, other = NumberStats.over(parts), NumberStats.over(groups)
    assert (one.low, one.high, one[3:]) == (other.low, other.high, other[3:])
    assert one.mean == other.mean or one.mean == pytest.approx(
        other.mean, rel=1e-6, abs=max(1e-6 * (one.high - one.low), 1e-300)
    )


def test_a_mean_of_numbers_at_the_end_of_fp64_stays_finite():
    spread = NumberStats.over([NumberStats.of(1.7e308)] * 3)
    assert math.isfinite(spread.mean)


def test_what_is_not_known_is_not_counted():
    assert NumberStats.over([NumberStats.of(None), NumberStats.of(3.0), NO_STATS]) == NumberStats.of(3.0)


@given(runs_of_rows(optimizers=1, largest=20).filter(bool))
def test_a_bucket_of_several_steps(rows):
    buckets = [StepBucket.of(row) for row in rows]
    bucket = merge_buckets(buckets)
    assert (bucket.first, bucket.last, bucket.count) == (1, len(rows), len(rows))
    assert bucket.skipped == sum(row.skipped for row in rows)
    assert (bucket.began, bucket.ended) == (rows[0].seconds, rows[-1].seconds)
    assert bucket.finite == all(row.finite for row in rows)
    for metric in ("loss", "norm", "scale", "lr"):
        assert getattr(bucket, metric) == NumberStats.over([NumberStats.of(getattr(row, metric)) for row in rows])


def test_adding_two():
    both = StepBucket.of(row(1, loss=2.0)) + StepBucket.of(row(2, loss=math.nan, skipped=True))
    assert (both.count, both.skipped, both.finite) == (2, 1, False)
    assert both.loss == NumberStats(2.0, 2.0, 2.0, finite=1, nans=1)
