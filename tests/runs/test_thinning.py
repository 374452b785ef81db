"""Fewer points as a run ages: what must not get lost."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.runs.json_lines import (
    bucket_line,
    layers_line,
    read_bucket,
    read_layers,
    step_line,
    thin_layers,
    thin_steps,
)
from ampwise.runs.rows import NumberStats, merge_buckets
from ampwise.runs.writer import RecordLimits

from ..for_each import for_each
from .record_toys import row, runs_of_rows, sample, samples

METRICS = ("loss", "norm", "scale", "lr")


def lines_of(rows):
    return [step_line(one).encode() for one in rows]


def by_optimizer(lines):
    found = {}
    for line in lines:
        bucket = read_bucket(line)
        found.setdefault(bucket.optimizer, []).append(bucket)
    return found


@given(runs_of_rows(), st.integers(0, 30), st.sampled_from([1, 2, 4, 8, 64]))
def test_counts_skips_extremes_and_bad_numbers_survive(rows, old, size):
    before = lines_of(rows)
    after = list(thin_steps(before, old=old, size=size))
    assert len(after) <= len(before)
    one, other = by_optimizer(before), by_optimizer(after)
    assert one.keys() == other.keys()
    for optimizer in one:
        first, second = merge_buckets(one[optimizer]), merge_buckets(other[optimizer])
        assert (first.first, first.last, first.count) == (second.first, second.last, second.count)
        assert (first.skipped, first.began, first.ended) == (second.skipped, second.began, second.ended)
        for metric in METRICS:
            mine, theirs = getattr(first, metric), getattr(second, metric)
            assert (mine.low, mine.high, mine[3:]) == (theirs.low, theirs.high, theirs[3:])


@given(runs_of_rows(), st.integers(0, 30), st.sampled_from([1, 2, 4, 8, 64]))
def test_each_optimizers_steps_stay_in_order_and_no_bucket_is_too_large(rows, old, size):
    for buckets in by_optimizer(thin_steps(lines_of(rows), old=old, size=size)).values():
        assert all(bucket.count <= size for bucket in buckets)
        assert all(earlier.last + 1 == later.first for earlier, later in pairwise(buckets))
        assert all(bucket.last - bucket.first + 1 == bucket.count for bucket in buckets)


@given(runs_of_rows(optimizers=1).filter(lambda rows: len(rows) > 1), st.integers(1, 4))
def test_merging_lines_is_merging_buckets(rows, size):
    lines = lines_of(rows)
    merged = list(thin_steps(lines, old=99, size=size))
    for once in (lines, merged, [*merged, lines[-1]]):  # steps, buckets, and both
        if len(once) > 1:
            expected = bucket_line(merge_buckets([read_bucket(line) for line in once]))
            assert [line.decode() for line in thin_steps(once, old=99, size=99)] == [expected]


@given(runs_of_rows(), st.integers(0, 30))
def test_recent_lines_are_the_same_bytes(rows, old):
    before = lines_of(rows)
    after = list(thin_steps(before, old=old, size=4))
    recent = before[old:]
    assert after[len(after) - len(recent) :] == recent


@given(runs_of_rows(optimizers=1), st.sampled_from([2, 4, 8]))
def test_doubling_is_as_good_as_merging_at_once(rows, size):
    before = lines_of(rows)
    twice = list(thin_steps(thin_steps(before, old=99, size=size), old=99, size=2 * size))
    once = list(thin_steps(before, old=99, size=2 * size))
    assert [read_bucket(line).count for line in twice] == [read_bucket(line).count for line in once]
    for one, other in zip(map(read_bucket, twice), map(read_bucket, once), strict=True):
        assert [getattr(one, metric)[3:] for metric in METRICS] == [getattr(other, metric)[3:] for metric in METRICS]
        assert one.loss.mean == other.loss.mean or one.loss.mean == pytest.approx(
            other.loss.mean, rel=1e-5, abs=1e-5 * (one.loss.high - one.loss.low)
        )


def test_a_bucket_that_stays_alone_is_not_written_anew():
    full = list(thin_steps(lines_of(row(step) for step in range(1, 17)), old=16, size=8))
    assert len(full) == 2
    assert list(thin_steps(full, old=2, size=8)) == full


def test_a_bucket_of_very_many_steps_is_made_in_several_goes():
    rows = [row(step, norm=float("inf") if step == 700 else 1.0) for step in range(1, 1001)]
    (line,) = thin_steps(lines_of(rows), old=1000, size=1024)
    bucket = read_bucket(line)
    assert (bucket.first, bucket.last, bucket.count) == (1, 1000, 1000)
    assert (bucket.norm.finite, bucket.norm.infs) == (999, 1)
    assert bucket.loss.mean == pytest.approx(sum(one.loss for one in rows) / 1000, rel=1e-5)


def test_lines_that_cannot_be_read_are_dropped():
    strange = [b"garbage\n", b"\xff\n", b'{"s":"two","t":0}\n']
    lines = [*lines_of([row(1)]), *strange, *lines_of([row(2), row(3)])]
    assert [read_bucket(line).count for line in thin_steps(lines, old=len(lines), size=2)] == [2, 1]
    good = layers_line(sample(1)).encode()
    bad = (json.dumps({**json.loads(good), "layers": {"weight": 3}}) + "\n").encode()
    assert list(thin_layers([good, bad, b"no json\n", b'{"s":1}\n'])) == [good]


@for_each(
    ("steps", "rows", "size"),
    [(0, 100, 1), (25, 100, 1), (26, 100, 2), (100, 100, 4), (101, 100, 8), (10**6, 100, 65536)],
)
def test_the_size_of_a_bucket_is_the_power_of_two_that_fits(steps, rows, size):
    assert RecordLimits(rows=rows).bucket_size(steps) == size


@given(st.integers(0, 10**9), st.integers(4, 10**6))
def test_what_is_old_takes_a_quarter_of_the_lines(steps, rows):
    size = RecordLimits(rows=rows).bucket_size(steps)
    assert -(-steps // size) <= rows // 4
    assert size == 1 or -(-steps // (size // 2)) > rows // 4  # and not less than it has to


# --- layers --------------------------------------------------------------------------------------------------------


def totals(lines):
    found = {}
    for line in lines:
        one = read_layers(line)
        for name, census in one.layers.items():
            key = one.optimizer, name
            found[key] = found[key] + census if key in found else census
    return found


@given(st.lists(samples(), max_size=8))
def test_the_total_census_is_the_same_after_thinning(several):
    before = [layers_line(one).encode() for one in several]
    after = list(thin_layers(before))
    assert totals(before) == totals(after)
    assert sum(read_layers(line).steps for line in after) == sum(one.steps for one in several)


def test_half_of_the_samples_are_left_and_each_optimizers_are_in_order():
    lines = [layers_line(sample(step, optimizer=step % 2)).encode() for step in range(1, 101)]
    after = [read_layers(line) for line in thin_layers(lines)]
    assert len(after) == 50
    for optimizer in (0, 1):
        mine = [one for one in after if one.optimizer == optimizer]
        assert [(one.first, one.last, one.steps) for one in mine] == [
            (first, first + 2, 2) for first in range(2 - optimizer, 100, 4)
        ]


@given(samples(optimizers=1), samples(optimizers=1))
def test_merging_lines_of_samples_is_adding_samples(one, other):
    lines = [layers_line(one).encode(), layers_line(other).encode()]
    assert [line.decode() for line in thin_layers(lines)] == [layers_line(one + other)]


def test_an_odd_sample_waits_for_the_next_time():
    lines = [layers_line(sample(step)).encode() for step in (1, 2, 3)]
    assert [read_layers(line).steps for line in thin_layers(lines)] == [2, 1]


def test_spreads_of_buckets_with_nothing_known():
    lines = [b'{"s":1,"t":0}\n', b'{"s":2,"t":0}\n']
    (line,) = thin_steps(lines, old=2, size=2)
    assert read_bucket(line).loss == NumberStats()
