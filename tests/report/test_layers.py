"""The table of layers: shares, losses at the present scale, order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.census.algebra import Census
from ampwise.record.bucket import Bucket
from ampwise.record.rows import StepRow
from ampwise.report.bars import bars, span_of
from ampwise.report.layers import about_layers, layers_of, percent


def at_scale(scale):
    return [Bucket.of(StepRow(step=1, scale=scale))]


def named(layers):
    return {layer.name: layer for layer in layers}


def test_dead_then_fading_then_healthy(make_run):
    assert [layer.name for layer in layers_of(make_run())] == ["blocks.1.bias", "blocks.0.weight", "head.weight"]


def test_the_numbers(make_run):
    found = named(layers_of(make_run(steps=at_scale(65536.0))))
    fading, healthy, dead = found["blocks.0.weight"], found["head.weight"], found["blocks.1.bias"]
    assert fading.lost == 0.25  # 2^-45 to 2^-44 times 2^16 is at most 2^-28; 2^-38 to 2^-37 is a subnormal
    assert fading.subnormal == 0.5
    assert healthy.lost == healthy.subnormal == 0
    assert healthy.norm == pytest.approx(0.05)  # of one step, not of the two that were added up
    assert (dead.dead, fading.dead) == (True, False)
    assert sum(layer.share for layer in found.values()) == pytest.approx(1)


def test_the_present_scale_is_the_last(make_run):
    rows = [Bucket.of(StepRow(step=step, scale=scale)) for step, scale in [(1, 65536.0), (2, 2.0), (3, None)]]
    assert {layer.scale for layer in layers_of(make_run(steps=rows))} == {2.0}
    # Without steps, that of the last sample.
    assert {layer.scale for layer in layers_of(make_run(steps=[]))} == {65536.0}


def test_a_scale_between_powers_hides_no_loss(make_run):
    low, between = (named(layers_of(make_run(steps=at_scale(scale)))) for scale in (32768.0, 65535.0))
    assert all(low[name].lost == between[name].lost for name in low)


def test_a_collapsed_scale_is_no_crash(make_run):
    assert all(layer.exponent == 0 for layer in layers_of(make_run(steps=at_scale(0.0))))


def test_bf16_loses_nothing_there(make_run):
    assert all(layer.lost == 0 and layer.fmt.name == "bf16" for layer in layers_of(make_run({"precision": "bf16"})))
    for other in ("something new", "mxfp8", 3):
        assert {layer.fmt.name for layer in layers_of(make_run({"precision": other}))} == {"fp16"}


def test_notes(make_run, make_sample):
    layers = {
        "near": Census(binades={-1: 1}, amax=0.9, amin=0.9),
        "over": Census(binades={2: 1}, amax=5.0, amin=5.0),
        "broken": Census(nans=2, infs=1000, zeros=5),
        "fine": Census(binades={-4: 1}, amax=0.1, amin=0.1),
    }
    found = named(layers_of(make_run(layers=[make_sample(1, layers)], steps=at_scale(65536.0))))
    assert {name: layer.notes for name, layer in found.items()} == {
        "near": ["near overflow"],
        "over": ["would overflow"],
        "broken": ["2 NaN", "1,000 inf"],
        "fine": [],
    }
    assert next(iter(found)) == "broken"


def test_two_optimizers_keep_their_own_layers(make_run, make_sample):
    one = Census(zeros=3)
    samples = [make_sample(1, {"w": one}), make_sample(1, {"w": one + one}, optimizer=1)]
    found = layers_of(make_run(layers=samples))
    assert [(layer.optimizer, layer.name, layer.census.count) for layer in found] == [(0, "w", 3), (1, "w", 6)]


def test_what_the_table_is_about(make_run):
    assert about_layers(layers_of(make_run())) == (
        "Gradients in true units, over 2 sampled steps; lost in FP16 at the last loss scale, 32,768"
    )
    assert about_layers(layers_of(make_run(steps=at_scale(2.0**40)))).endswith("2^40")


@given(st.floats(0, 1))
def test_a_share_reads_as_zero_or_all_only_if_it_is(share):
    assert (percent(share) == "0") == (share == 0)
    assert (percent(share) == "100%") == (share == 1)


def test_bars_have_one_path_for_each_fate(make_run):
    layers = layers_of(make_run(steps=at_scale(65536.0)))
    span = span_of(layers)
    fading = bars(named(layers)["blocks.0.weight"], span)
    assert [fate for fate in ("lost", "subnormal", "normal", "overflow") if f'class="{fate}"' in fading] == [
        "lost",
        "subnormal",
        "normal",
    ]
    assert bars(named(layers)["blocks.1.bias"], span) == ""


def test_a_layer_of_two_thousand_binades_is_drawn_small(make_run, make_sample):
    wide = Census(binades=dict.fromkeys(range(-1000, 1000), 1), amax=2.0**999.5, amin=2.0**-999.5)
    layers = layers_of(make_run(layers=[make_sample(1, {"w": wide})], steps=at_scale(1.0)))
    span = span_of(layers)
    assert span.high - span.low < 60
    assert len(bars(layers[0], span)) < 4000
