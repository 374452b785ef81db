"""The table of layers: shares, what FP16 lost, order."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import underflow
from ampwise.report.formatting import format_percent
from ampwise.report.layers import describe_layers, layers_headings, layers_of, layers_title
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding, LayerSample, StepBucket, StepRow


def at_scale(scale):
    return [StepBucket.of(StepRow(step=1, scale=scale))]


def named(layers):
    return {layer.name: layer for layer in layers}


def test_dead_then_fading_then_healthy(make_run):
    assert [layer.name for layer in layers_of(make_run())] == ["blocks.1.bias", "blocks.0.weight", "head.weight"]


def test_the_numbers(make_run):
    found = named(layers_of(make_run(steps=at_scale(65536.0))))
    fading, healthy, dead = found["blocks.0.weight"], found["head.weight"], found["blocks.1.bias"]
    assert 0.03 < fading.lost < 0.2
    assert fading.subnormal > 0.5
    assert healthy.lost == healthy.subnormal == 0
    assert healthy.norm == pytest.approx(0.05)  # of one step, not of the two that were added up
    assert (dead.dead, fading.dead) == (True, False)
    assert sum(layer.share for layer in found.values()) == pytest.approx(1)


def test_the_present_scale_is_the_last(make_run):
    rows = [StepBucket.of(StepRow(step=step, scale=scale)) for step, scale in [(1, 65536.0), (2, 2.0), (3, None)]]
    assert {layer.scale for layer in layers_of(make_run(steps=rows))} == {2.0}
    # Without steps, that of the last sample.
    assert {layer.scale for layer in layers_of(make_run(steps=[]))} == {65536.0}


def test_a_layer_whose_weights_do_not_move_is_not_fine(make_run):
    moved = {"optimizer": 0, "moved": {"head.weight": 0.01}}
    lost = find_rule("AMP611").at(Place(), "the weights hardly move", evidence={"lost_updates": moved})
    found = layers_of(make_run(findings=[CountedFinding(finding=lost)]))
    assert named(found)["head.weight"].notes == ["updates change 1.0% of it"]
    assert not named(found)["blocks.0.weight"].notes


def test_a_scale_between_powers_hides_no_loss(make_run):
    low, between = (named(layers_of(make_run(steps=at_scale(scale)))) for scale in (32768.0, 65535.0))
    assert all(low[name].lost == between[name].lost for name in low)


def test_the_estimate_is_that_of_the_rule_and_not_what_is_left_below_the_limit(make_run, make_sample):
    """Gradients that come out of FP16 hold nothing below its smallest number, whatever was lost."""
    early = Census(binades={-12: 60}, amax=2**-11.5, amin=2**-11.5, zeros=420)
    late = Census(binades={-41: 100, -40: 200, -39: 300}, amax=2**-38.5, amin=2**-40, zeros=900)
    samples = [make_sample(1, {"w": early}), make_sample(2, {"w": late})]
    (layer,) = layers_of(make_run(layers=samples, steps=at_scale(65536.0)))
    assert layer.census.flushed("fp16", 16) == 0
    assert layer.lost == underflow(late, 65536.0).lost_share > 0
    # Of what was not finite nothing can be said, and the sample before it is the last.
    (layer,) = layers_of(make_run(layers=[*samples, make_sample(3, {"w": Census(nans=9)})], steps=at_scale(65536.0)))
    assert layer.lost == underflow(late, 65536.0).lost_share


def test_a_scale_that_fell_after_the_last_sample_loses_more_and_one_that_grew_gives_nothing_back(make_run):
    lost = {
        scale: named(layers_of(make_run(steps=at_scale(scale))))["blocks.0.weight"].lost for scale in (1.0, 2.0**16)
    }
    grown = named(layers_of(make_run(steps=at_scale(2.0**20))))["blocks.0.weight"].lost
    assert lost[1.0] > 0.9
    assert grown == lost[2.0**16] < 0.5


def test_what_never_was_in_fp16_loses_nothing(make_run, make_sample):
    wide = Census(binades={-60: 50, -20: 50}, amax=2**-19.5, amin=2**-59.5)
    layers = layers_of(make_run(layers=[make_sample(1, {"norm.weight": wide})], steps=at_scale(65536.0)))
    assert layers[0].lost == layers[0].subnormal == 0


def test_a_collapsed_scale_is_no_crash(make_run):
    assert all(layer.exponent == 0 for layer in layers_of(make_run(steps=at_scale(0.0))))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_a_run_in_another_format_would_lose_in_fp16_is_not_reported(make_run, make_sample, precision):
    layers = layers_of(make_run({"precision": precision}))
    assert all(layer.lost is None and layer.subnormal is None and layer.fmt.name == precision for layer in layers)
    assert layers_headings(layers) == ["share", "norm", "largest"]
    assert describe_layers(layers) == "Unscaled gradients over 2 sampled steps"
    # A dead layer is worse than the others in any format; where there is none, there is no worst.
    assert layers_title(layers) == "Layers, worst first"
    alive = {name: Census(binades={-60: 1}, amax=2**-59.5, amin=2**-59.5) for name in ("stem", "body", "head")}
    layers = layers_of(make_run({"precision": precision}, layers=[make_sample(1, alive)]))
    assert [layer.name for layer in layers] == list(alive)
    assert layers_title(layers) == "Layers"


@pytest.mark.parametrize("precision", [None, "something new", "mxfp8", 3])
def test_who_does_not_say_its_format_has_fp16_if_it_has_a_loss_scale(make_run, precision):
    """As a run that was killed before its end."""
    run = make_run({"precision": precision})
    assert {layer.fmt.name for layer in layers_of(run)} == {"fp16"}
    bare = [LayerSample(first=1, last=1, layers=sample.layers) for sample in run.layers]
    assert {layer.fmt.name for layer in layers_of(make_run({"precision": precision}, layers=bare, steps=[]))} == {
        "fp32"
    }


def test_notes(make_run, make_sample):
    layers = {
        "near": Census(binades={-1: 1}, amax=0.9, amin=0.9),
        "over": Census(binades={2: 1}, amax=5.0, amin=5.0),
        "broken": Census(nans=2, infs=1000, zeros=5),
        "fine": Census(binades={-4: 1}, amax=0.1, amin=0.1),
    }
    found = named(layers_of(make_run(layers=[make_sample(1, layers)], steps=at_scale(65536.0))))
    assert {name: layer.notes for name, layer in found.items()} == {
        "near": [],  # where a scale that grows ends in the best of runs
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
    assert describe_layers(layers_of(make_run())) == (
        "Unscaled gradients over 2 sampled steps; "
        "lost and subnormal in FP16 in the last finite one, at the last loss scale, 32,768"
    )
    alone = make_run(layers=make_run().layers[:1])
    assert describe_layers(layers_of(alone)) == (
        "Unscaled gradients over 1 sampled step; lost and subnormal in FP16 at the last loss scale, 32,768"
    )
    assert "at the last loss scale, 2^40" in describe_layers(layers_of(make_run(steps=at_scale(2.0**40))))


def test_optimizers_have_scales_and_names_of_their_own(make_run, make_sample):
    rows = [StepBucket.of(StepRow(optimizer=n, step=1, scale=2.0**n)) for n in (0, 1)]
    samples = [make_sample(1, {"w": Census(zeros=3)}, optimizer=n) for n in (0, 1)]
    known = [
        {"index": 0, "name": "AdamW", "model": "Generator"},
        {"index": 1, "name": "SGD", "model": ""},
        {"index": []},
    ]
    layers = layers_of(make_run({"optimizers": known}, layers=samples, steps=rows))
    assert [(layer.scale, layer.name_and_owner) for layer in layers] == [
        (1.0, "w (AdamW of Generator)"),
        (2.0, "w (SGD)"),
    ]
    assert describe_layers(layers).endswith("subnormal in FP16 at each optimizer's last loss scale")
    twins = [{"index": n, "name": "Adam", "model": "Net"} for n in (0, 1)]
    for facts, owners in [
        ({"optimizers": twins}, ["Adam of Net, optimizer 0", "Adam of Net, optimizer 1"]),
        ({}, ["optimizer 0", "optimizer 1"]),
    ]:
        assert [layer.owner for layer in layers_of(make_run(facts, layers=samples, steps=rows))] == owners


censuses = st.builds(
    lambda binades, zeros, nans: Census(
        binades=binades,
        zeros=zeros,
        nans=nans,
        amax=2.0 ** (max(binades) + 0.5) if binades else 0.0,
        amin=2.0 ** (min(binades) + 0.5) if binades else 0.0,
        sum_squares=float(zeros),
    ),
    st.dictionaries(st.integers(-30, 5), st.integers(1, 9), max_size=4),
    st.integers(0, 3),
    st.integers(0, 3),
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), censuses), max_size=5))
def test_the_total_of_all_samples_is_their_sum(samples):
    run = Run(folder=Path("r"), manifest={}, layers=[LayerSample(first=1, last=1, layers=layers) for layers in samples])
    total = run.total_layers()
    for name in "abc":
        parts = [layers[name] for layers in samples if name in layers]
        assert total.get(name, 0) == sum(parts)
        assert not parts or total[name].sum_squares == sum(parts).sum_squares


def test_the_total_makes_no_census_on_the_way(monkeypatch):
    """500 samples of 148 layers took a second to add up one by one."""
    one = Census(binades={-3: 1}, amax=0.2, amin=0.2)
    run = Run(
        folder=Path("r"), manifest={}, layers=[LayerSample(first=n, last=n, layers={"w": one}) for n in (1, 2, 3)]
    )
    made = []
    monkeypatch.setattr(Census, "__post_init__", lambda self: made.append(self))
    assert run.total_layers()["w"].count == 3
    assert len(made) == 1


@given(st.floats(0, 1))
def test_a_share_reads_as_zero_or_all_only_if_it_is(share):
    assert (format_percent(share) == "0") == (share == 0)
    assert (format_percent(share) == "100%") == (share == 1)
