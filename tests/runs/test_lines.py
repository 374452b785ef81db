"""Rows and samples as lines of JSON, and back."""

import json
import math

import pytest
from hypothesis import given

from ampwise.runs.json_lines import (
    LINE_ERRORS,
    bucket_line,
    layers_line,
    read_bucket,
    read_layers,
    step_line,
)
from ampwise.runs.rows import NumberStats, StepBucket, StepRow, merge_buckets

from ..for_each import for_each
from .record_toys import row, runs_of_rows, sample, samples


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def close(one, other, rel):
    if one is None or other is None:
        return one == other
    return one == pytest.approx(other, rel=rel, abs=1e-320)


@given(runs_of_rows())
def test_a_step_comes_back_as_it_was(rows):
    for one in rows:
        line = step_line(one)
        json.loads(line, parse_constant=refuse)  # strict
        read, meant = read_bucket(line), StepBucket.of(one)
        assert (read.first, read.last, read.count, read.optimizer) == (one.step, one.step, 1, one.optimizer)
        assert (read.skipped, read.began) == (meant.skipped, meant.began)
        assert read.scale == meant.scale  # exact
        for metric in ("loss", "norm", "lr"):
            mine, theirs = getattr(read, metric), getattr(meant, metric)
            assert mine[3:] == theirs[3:]
            assert close(mine.mean, theirs.mean, 5e-7)


@given(runs_of_rows(optimizers=1).filter(lambda rows: len(rows) > 1))
def test_a_bucket_comes_back_as_it_was(rows):
    bucket = merge_buckets([read_bucket(step_line(one)) for one in rows])
    line = bucket_line(bucket)
    json.loads(line, parse_constant=refuse)
    read = read_bucket(line.encode())
    for metric in ("loss", "norm", "lr"):
        mine, theirs = getattr(read, metric), getattr(bucket, metric)
        assert (mine.low, mine.high, mine[3:]) == (theirs.low, theirs.high, theirs[3:])
        assert close(mine.mean, theirs.mean, 5e-7)
        assert mine.mean is None or mine.low <= mine.mean <= mine.high
    assert read.scale == bucket.scale
    assert (read.first, read.last, read.count, read.skipped) == (
        bucket.first,
        bucket.last,
        bucket.count,
        bucket.skipped,
    )
    assert bucket_line(read) == line  # thinning again changes nothing


@given(samples())
def test_a_sample_comes_back_as_it_was(one):
    line = layers_line(one)
    json.loads(line, parse_constant=refuse)
    assert line.count("\n") == 1
    read = read_layers(line)
    assert read == one
    assert list(read.layers) == list(one.layers)
    assert [c.sum_squares for c in read.layers.values()] == [c.sum_squares for c in one.layers.values()]


def test_a_line_is_short():
    assert len(step_line(row(1_000_000, loss=1 / 3, norm=1 / 7, lr=1 / 30000))) < 100


def test_what_is_not_known_is_not_reported():
    assert step_line(StepRow(step=4)) == '{"s":4,"t":0.0000}\n'
    assert read_bucket('{"s":4,"t":0}') == StepBucket(first=4, last=4)


def test_words_for_what_json_has_no_number_for():
    line = step_line(StepRow(step=1, loss=math.nan, norm=math.inf, lr=-math.inf, seconds=math.nan))
    assert line == '{"s":1,"t":0,"l":"NaN","n":"Infinity","r":"-Infinity"}\n'
    assert read_bucket(line).lr == NumberStats(negative_infs=1)


@for_each(
    "line",
    [
        b"",
        b"\0\0\0\0",
        b"\xff\xfe{}",
        b"[]",
        b"3",
        b"{}",
        b'{"s":1}',
        b'{"s":-1,"t":0}',
        b'{"s":true,"t":0}',
        b'{"s":"1","t":0}',
        b'{"s":1.5,"t":0}',
        b'{"s":1,"t":"NaN"}',
        b'{"s":1,"t":NaN}',
        b'{"s":1,"t":0,"l":"nine"}',
        b'{"s":1,"t":0,"l":[1]}',
        b'{"s":1,"t":0,"l":true}',
        b'{"s":1,"t":0}{"s":2,"t":0}\n',
        b'{"s":[2,1],"k":2,"t":[0,0]}',
        b'{"s":[1,2],"k":2,"t":[0,0],"x":3}',
        b'{"s":[1,2,3],"k":3,"t":[0,0]}',
        b'{"s":[1,2],"k":2,"t":[0,0],"l":[1,2]}',
        b'{"s":[1,2],"k":2,"t":[0,0],"l":[1,2,3,4,5,6,7,8]}',
        b'{"s":[1,2],"k":2,"t":[0,0],"l":[1,null,3]}',
        b'{"s":1,"t":' + b"9" * 400 + b"}",
        b'{"s":' + b"[" * 100_000,
    ],
)
def test_a_line_that_makes_no_sense_is_refused_in_one_way(line):
    with pytest.raises(LINE_ERRORS):
        read_bucket(line)


def broken_samples():
    good = json.loads(layers_line(sample(3)))
    census = good["layers"]["weight"]
    for position, value in [(0, -1), (1, 1.5), (3, 1e9), (3, "x"), (5, -1), (6, None), (7, {}), (7, ["1"])]:
        yield {**good, "layers": {"weight": [*census[:position], value, *census[position + 1 :]]}}
    yield {**good, "layers": [census]}
    yield {**good, "layers": {"weight": census[:-1]}}
    yield {**good, "s": [1]}
    yield {name: value for name, value in good.items() if name != "k"}


@for_each("data", list(broken_samples()))
def test_a_sample_that_makes_no_sense_is_refused_in_one_way(data):
    with pytest.raises(LINE_ERRORS):
        read_layers(json.dumps(data))
