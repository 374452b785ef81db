"""What formats cost and gain, by hand."""

import pytest
from torch import nn

from ampwise.hardware import gpu_named
from ampwise.tune.search.costs import estimate_gain, unit_costs
from ampwise.tune.search.format_choices import parse_formats
from ampwise.tune.search.units import SearchUnit

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
