"""The heat map: its numbers against those of each sample alone, and what is kept from one map to the next."""

import itertools
import math
from dataclasses import replace

import pytest

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import underflow
from ampwise.report.layers import layers_of
from ampwise.report.page import charts as heat
from ampwise.report.page.charts import COLUMNS, heat_maps

HEALTHY = Census(binades={-12: 60, -11: 30, -8: 10}, amax=2**-7.5, amin=2**-11.5, sum_squares=0.0025)
DEAD = Census(zeros=50)
BAD = Census(binades={-3: 4}, nans=1, amax=0.2, amin=0.2, sum_squares=0.16)


def fading(share):
    """At a scale of 65536 the lowest powers of two are FP16's last, and what is below them is among the zeros."""
    return Census(
        binades={-41: 30 + 4 * share, -40: 60, -39: 60, -38: 60, -37: 40, -20: 20},
        zeros=1000,
        amax=2**-19.5,
        amin=2**-40.5,
        sum_squares=share * 1e-10,
    )


@pytest.fixture
def maps(make_run):
    """The first map of a run with these samples."""

    def of(samples, **manifest):
        run = make_run(layers=samples, **manifest)
        return heat_maps(run, layers_of(run))[0]

    return of


@pytest.fixture
def counted(monkeypatch):
    """The censuses of which it was counted what they lost."""
    made = []
    monkeypatch.setattr(
        heat, "underflow", lambda census, scale, real=heat.underflow: made.append(1) or real(census, scale)
    )
    return made


# --- the numbers ---------------------------------------------------------------------------------------------------


def test_a_column_for_each_sample(maps, make_sample):
    samples = [
        make_sample(step, {"stem": HEALTHY, "head": fading(30 * step), "dead": DEAD, "bad": BAD}) for step in (1, 2, 3)
    ]
    found = maps(samples)
    per_power, per_million = found["per_power"], found["per_million"]
    assert (per_power, per_million) == (256, 1_000_000)
    assert (found["first"], found["last"], found["exponent"]) == ([1, 2, 3], [1, 2, 3], [16, 16, 16])
    assert found["exponent_high"] == found["exponent"]
    assert (found["samples"], found["steps"], found["merged"]) == (3, 3, False)
    assert "lost_low" not in found
    assert found["lost"][2:] == [["zero"] * 3, ["bad"] * 3]
    for column, sample in enumerate(samples):
        for row, name in enumerate(("stem", "head")):
            census = sample.layers[name]
            lost = underflow(census, 65536.0).lost_share
            assert lost <= found["lost"][row][column] / per_million < lost + 2e-6  # a small share is never told as none
            assert 2 ** (found["norm"][row][column] / per_power) == pytest.approx(census.norm, rel=0.002)
            assert 2 ** (found["largest"][row][column] / per_power) == pytest.approx(census.amax, rel=0.002)


def test_put_together_the_extremes_stay(maps, make_sample):
    """Three samples to a column: of them the most and the least that was lost, the largest norm, both scales."""
    count = 2 * COLUMNS + 5
    scales = [2.0 ** (14 + step % 3) for step in range(count)]
    samples = [
        replace(make_sample(step + 1, {"head": fading(1 + step % 7)}, steps=2), scale=scale)
        for step, scale in enumerate(scales)
    ]
    alone = [maps([sample]) for sample in samples]
    found = maps(samples)
    assert len(found["first"]) <= COLUMNS
    assert (found["samples"], found["steps"], found["merged"]) == (count, 2 * count, True)
    starts = [*found["first"], count + 1]
    for column, (first, end) in enumerate(itertools.pairwise(starts)):
        group = alone[first - 1 : end - 1]
        assert found["last"][column] == end - 1
        assert found["lost"][0][column] == max(one["lost"][0][0] for one in group)
        assert found["lost_low"][0][column] == min(one["lost"][0][0] for one in group)
        assert found["norm"][0][column] == max(one["norm"][0][0] for one in group)
        exponents = [math.log2(scale) for scale in scales[first - 1 : end - 1]]
        assert (found["exponent"][column], found["exponent_high"][column]) == (min(exponents), max(exponents))


def test_a_sample_of_several_steps_is_merged_though_it_is_alone(maps, make_sample):
    assert maps([make_sample(1, {"head": HEALTHY}, steps=4)])["merged"] is True
    assert maps([make_sample(1, {"head": HEALTHY})])["merged"] is False


def test_without_a_loss_scale_there_is_no_exponent(maps, make_sample):
    plain = [replace(make_sample(step, {"head": fading(60)}), scale=None) for step in (1, 2)]
    found = maps(plain, facts={"precision": "bf16"})
    assert (found["exponent"], found["exponent_high"], found["was_fp16"]) == ([None, None], [None, None], False)
    flushed = fading(60).flushed("fp16").low / fading(60).nonzeros
    assert found["lost"][0] == [math.ceil(flushed * 1e6)] * 2


def test_a_layer_that_some_samples_lack(maps, make_sample):
    found = maps([make_sample(1, {"stem": HEALTHY}), make_sample(2, {"stem": HEALTHY, "late": fading(60)})])
    assert found["lost"][1][0] is None
    assert found["lost"][1][1] > 0


# --- what is kept --------------------------------------------------------------------------------------------------


def test_of_a_run_that_grows_only_what_is_new_is_counted(maps, make_sample, counted):
    samples = [make_sample(step, {"stem": HEALTHY, "head": fading(step)}) for step in range(1, 40)]
    first = maps(samples)
    assert len(counted) == 2 * 39
    counted.clear()
    assert maps(samples) == first
    assert counted == []
    samples.append(make_sample(40, {"stem": HEALTHY, "head": fading(40)}))
    grown = maps(samples)
    assert len(counted) == 2
    assert [row[:-1] for row in grown["lost"]] == first["lost"]


def test_what_is_kept_is_of_these_samples_and_of_this_format(maps, make_sample, counted):
    """Equal samples of another run are others; in another format the same sample loses something else."""
    samples = [make_sample(1, {"head": fading(60)})]
    as_fp16 = maps(samples)
    assert maps(samples, facts={"precision": "bf16"})["lost"] != as_fp16["lost"]
    assert maps(samples) == as_fp16
    assert len(counted) == 2
    maps([make_sample(1, {"head": fading(50)})])
    assert len(counted) == 3


def test_no_more_is_kept_than_the_last_run(maps, make_sample):
    for length in (30, 5, 12):
        maps([make_sample(step, {"head": HEALTHY}) for step in range(length)])
        assert len(heat._CACHE) == length


def test_layers_that_are_shown_later_have_cells_of_their_own(make_run, make_sample):
    """Of very many only the worst are shown, and which these are changes."""
    run = make_run(layers=[make_sample(1, {"stem": HEALTHY, "head": fading(60)})])
    layers = layers_of(run)
    alone = [heat_maps(run, [layer])[0]["lost"] for layer in layers]
    assert heat_maps(run, layers)[0]["lost"] == [row for layer in reversed(alone) for row in layer]
