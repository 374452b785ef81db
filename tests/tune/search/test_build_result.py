"""What a result is built of, by hand: costs and gain, patterns of names, and how far off a policy can be."""

from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampwise.hardware import gpu_named
from ampwise.tune.search.arrangement import parse_formats
from ampwise.tune.search.build_result import cost_gap, estimate_gain, globs, spans, unit_costs
from ampwise.tune.search.descent import FormatLadder
from ampwise.tune.search.units import SearchUnit

# Costs and gain


UNITS = [
    SearchUnit(name=name, module=nn.Identity(), kind="Linear", flops=flops) for name, flops in (("a", 3e9), ("b", 1e9))
]
CHOICES = parse_formats(("e4m3", "bf16", "fp32"))
E4M3, BF16, FP32 = CHOICES


def test_bits_are_weighed_by_flops():
    assert unit_costs(UNITS, CHOICES) == ((3 / 16, 3 / 8, 3 / 4), (1 / 16, 1 / 8, 1 / 4))
    assert estimate_gain(UNITS, [FP32, FP32], CHOICES, None, None).cost == 1.0
    assert estimate_gain(UNITS, [E4M3, BF16], CHOICES, None, None).cost == 3 / 16 + 1 / 8


def test_times_are_those_of_a_datasheet():
    gpu = gpu_named("h200")
    gain = estimate_gain(UNITS, [E4M3, BF16], CHOICES, gpu, (10, 40))
    seconds = 3e9 / gpu.peak_flops["fp8"] + 1e9 / gpu.peak_flops["bf16"]
    assert gain.faster_than_fp32 == pytest.approx(4e9 / gpu.peak_flops["fp32"] / seconds)
    assert gain.faster_than_16_bits == pytest.approx(4e9 / gpu.peak_flops["bf16"] / seconds)
    assert (gain.gpu, gain.kept_bytes, gain.kept_bytes_fp32, gain.why_no_time) == ("h200", 10, 40, None)


def test_without_tensor_cores_there_is_no_time_but_a_reason():
    gain = estimate_gain(UNITS, [E4M3, BF16], CHOICES, gpu_named("a100-sxm-80"), None)
    assert gain.faster_than_fp32 is None
    assert gain.why_no_time == f"{gpu_named('a100-sxm-80').name} has no tensor cores for e4m3"
    wide = estimate_gain(UNITS, [BF16, BF16], CHOICES, gpu_named("a100-sxm-80"), None)
    assert wide.faster_than_16_bits == 1.0
    assert estimate_gain(UNITS, [BF16, BF16], CHOICES, None, None).why_no_time == "no GPU was given"


# Patterns


PART = st.sampled_from(["blocks", "0", "1", "12", "up", "a[0]", "x*", "q?"])
NAMES = st.sets(st.lists(PART, min_size=1, max_size=4).map(".".join), max_size=12)


@given(NAMES, NAMES)
def test_they_match_all_of_the_names_and_none_of_the_others(names, others):
    others = others - names
    patterns = globs(sorted(names), others)
    for name in names:
        assert any(fnmatchcase(name, pattern) for pattern in patterns)
    for name in others:
        assert not any(fnmatchcase(name, pattern) for pattern in patterns)


def test_numbers_give_way_where_they_can():
    names = [f"blocks.{block}.{part}" for block in range(12) for part in ("up", "down")]
    assert globs(names, ["head", "blocks.0"]) == ["blocks.*.up", "blocks.*.down"]
    assert globs(["experts.0.0", "experts.1.0"], ["experts.0.2", "experts.1.2"]) == ["experts.*.0"]


def test_none_is_there_that_another_makes_needless():
    assert globs(["blocks.0.up", "blocks.0", "blocks.1.up", "blocks.1", "head"], ["stem"]) == ["blocks.*", "head"]


def test_the_model_itself_has_an_empty_name():
    assert globs([""], ["body", "head"]) == [""]


def test_for_people_numbers_are_spans():
    assert spans(["layers.0", "layers.1", "layers.2", "layers.4"]) == ["layers.{0..2,4}"]
    assert spans(["a.0.x", "a.1.x", "a.0.y", "", "b"]) == ["a.{0,1}.x", "a.0.y", "", "b"]


# The gap


LADDER = FormatLadder(
    formats=3,
    lowest=(0, 0, 0),
    costs=((0.1, 0.2, 0.4), (0.1, 0.2, 0.4), (0.05, 0.1, 0.2)),
    scores=((0.0,) * 3,) * 3,
)


def gap(found, alone):
    tried = {unit: (place, SimpleNamespace(error=error)) for unit, (place, error) in alone.items()}
    return cost_gap(LADDER, found, tried, tolerance=0.02)


def test_where_each_was_shown_to_need_it_there_is_none():
    assert gap((0, 2, 0), {1: (1, 0.03)}) == 0.0
    assert gap((1, 2, 0), {0: (0, 0.5), 1: (1, 0.03)}) == pytest.approx(0.0)
    assert gap((0, 0, 0), {}) == 0.0


def test_what_passes_alone_may_not_have_been_needed():
    """Of 0.1 + 0.4 + 0.05, the 0.3 above the cheapest; but all narrow has failed, so that something costs 0.05 more."""
    assert gap((0, 2, 0), {1: (1, 0.01)}) == pytest.approx((0.3 - 0.05) / 0.55)
    assert gap((1, 2, 0), {0: (0, 0.5), 1: (1, 0.01)}) == pytest.approx(0.3 / 0.65)


def test_one_that_was_raised_later_counts_as_far_as_it_was_shown():
    assert gap((2, 0, 0), {0: (0, 0.5)}) == pytest.approx(0.2 / 0.55)
