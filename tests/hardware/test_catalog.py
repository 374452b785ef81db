"""Every entry of the catalog is plausible, says where it comes from, and contradicts no known fact."""

from __future__ import annotations

import copy
import json
import pickle
import tomllib
from importlib.resources import files

import pytest

from ampwise.hardware import Gpu, gpu_named, gpus
from ampwise.hardware.catalog import UNITS, nvidia_tensor_cores

FORMATS = {
    "fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp6", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "int8", "int4",
}  # fmt: skip
VENDORS = {"nvidia", "amd", "intel", "google", "apple"}
BACKENDS = {"hpu", "xla", "mps"}
KEYS = {
    "id", "name", "vendor", "arch", "capability", "torch_names", "also_called", "memory_gb", "bandwidth_gbs",
    "tensor_core_formats", "tflops", "approximate", "sources", "note",
}  # fmt: skip
# Its FP8 units run at the rate of its BF16 units; the catalog's note says so.
FP8_NO_FASTER = {"gaudi3"}
FP16_AS_SLOW_AS_TF32 = {"gaudi3"}

DOCUMENT = tomllib.loads(files("ampwise.hardware").joinpath("gpus.toml").read_text(encoding="utf-8"))


def each(gpus):
    return pytest.mark.parametrize("gpu", list(gpus), ids=lambda gpu: gpu.id)


every_gpu = each(gpus())
every_nvidia_gpu = each(gpu for gpu in gpus() if gpu.vendor == "nvidia")
every_table = pytest.mark.parametrize("table", DOCUMENT["device"], ids=lambda table: table["id"])


def rate(gpu: Gpu, fmt: str) -> float | None:
    """A peak for comparing, approximate or not."""
    figure = gpu.figure(fmt)
    return None if figure is None else figure.value


@every_table
def test_a_table_has_only_known_keys(table):
    assert set(table) <= KEYS


@every_table
def test_a_number_is_either_known_or_approximate(table):
    known = {*table.get("tflops", {}), *(UNITS.keys() & table.keys())}
    assert not known & table.get("approximate", {}).keys()


@every_table
def test_approximate_numbers_are_explained(table):
    assert table.get("note") or not table.get("approximate")


@every_gpu
def test_every_source_is_a_url(gpu):
    assert gpu.sources
    assert all(source.startswith("https://") for source in gpu.sources)


def test_no_source_is_left_unused():
    used = {key for table in DOCUMENT["device"] for key in table["sources"]}
    assert used == set(DOCUMENT["sources"])


@every_gpu
def test_names_of_formats_and_vendors_are_known(gpu):
    assert gpu.vendor in VENDORS
    assert set(gpu.tensor_core_formats or ()) <= FORMATS
    assert set(gpu.peak_flops) <= FORMATS
    assert set(gpu.approximate) <= FORMATS | {"memory_bytes", "memory_bytes_per_s"}


@every_gpu
def test_capability_is_of_the_vendors_kind(gpu):
    if gpu.vendor == "nvidia":
        assert gpu.compute_capability is not None
        assert (5, 0) < gpu.compute_capability < (20, 0)
    else:
        assert gpu.compute_capability is None
        assert gpu.capability.startswith("gfx") or gpu.capability in BACKENDS


@every_gpu
def test_memory_is_plausible(gpu):
    size, bandwidth = gpu.figure("memory_bytes"), gpu.figure("memory_bytes_per_s")
    assert 8 * 2**30 <= size.value <= 512 * 2**30
    assert 100e9 <= bandwidth.value <= 10e12, "check the units"
    # Reading all of it once takes between ten milliseconds and half a second on anything sold.
    assert 0.005 < size.value / bandwidth.value < 0.5


@every_gpu
def test_ridge_points_are_plausible(gpu):
    for fmt in {*gpu.peak_flops, *gpu.approximate} & FORMATS:
        ridge = gpu.ridge_figure(fmt).value
        low, high = (50, 1500) if gpu.has_tensor_cores(fmt) and fmt not in {"fp32", "tf32"} else (5, 350)
        assert low < ridge < high, f"{gpu.name} {fmt}: {ridge:.2f} FLOP/byte, check the units"


@each(gpu for gpu in gpus() if gpu.compute_capability and gpu.compute_capability >= (8, 0))
def test_bf16_runs_at_the_rate_of_fp16_from_ampere_on(gpu):
    assert rate(gpu, "bf16") == rate(gpu, "fp16")


@each(gpu for gpu in gpus() if rate(gpu, "fp8"))
def test_fp8_runs_at_twice_the_rate_of_bf16(gpu):
    ratio = rate(gpu, "fp8") / rate(gpu, "bf16")
    assert ratio == pytest.approx(1 if gpu.id in FP8_NO_FASTER else 2, rel=0.02)


@each(gpu for gpu in gpus() if rate(gpu, "tf32") and gpu.id not in FP16_AS_SLOW_AS_TF32)
def test_tf32_runs_at_half_the_rate_of_fp16(gpu):
    assert rate(gpu, "tf32") / rate(gpu, "fp16") == pytest.approx(0.5, rel=0.02)


@every_gpu
def test_no_peak_without_the_units_for_it(gpu):
    """A narrow format has a rate of its own only where tensor cores take it; FP16 also has vector units."""
    narrow = {"tf32", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"} & {*gpu.peak_flops, *gpu.approximate}
    assert all(gpu.has_tensor_cores(fmt) for fmt in narrow)


@every_nvidia_gpu
def test_the_catalog_agrees_with_what_the_capability_says(gpu):
    for fmt in DOCUMENT["nvidia_tensor_cores"]:
        told = nvidia_tensor_cores(fmt, gpu.compute_capability)
        assert told in (None, gpu.has_tensor_cores(fmt)), fmt


@every_gpu
def test_as_dict_is_json(gpu):
    assert json.loads(json.dumps(gpu.as_dict()))["id"] == gpu.id


@every_gpu
def test_only_certain_ridge_points_are_plain_data(gpu):
    told = gpu.as_dict()["ridge_flop_per_byte"]
    assert told == {fmt: gpu.ridge(fmt) for fmt in FORMATS if gpu.ridge(fmt) is not None}


@every_gpu
def test_a_gpu_can_be_pickled_copied_and_hashed(gpu):
    assert pickle.loads(pickle.dumps(gpu)) == copy.deepcopy(gpu) == gpu
    assert hash(copy.deepcopy(gpu)) == hash(gpu)


# What guides get wrong, and the catalog must not.


def test_v100_has_no_bf16():
    assert not gpu_named("v100-sxm2-16").has_tensor_cores("bf16")


def test_rtx_3090_has_bf16_and_no_fp8():
    gpu = gpu_named("rtx3090")
    assert gpu.has_tensor_cores("bf16")
    assert not gpu.has_tensor_cores("fp8")
    assert gpu.peak_flops["bf16"] == 71.2e12, "142 is the FP16-accumulate rate"


def test_a100_has_no_fp8():
    for name in ("a100-40", "a100-sxm-80", "a100-pcie-80"):
        assert not gpu_named(name).has_tensor_cores("fp8")
        assert "fp8" not in gpu_named(name).peak_flops


def test_h100_peaks_are_dense():
    gpu = gpu_named("h100-sxm")
    assert gpu.peak_flops["fp8"] == pytest.approx(1979e12, rel=1e-3), "3958 is with sparsity"
    assert gpu.peak_flops["bf16"] == pytest.approx(989e12, rel=1e-3)


def test_mi250x_is_what_torch_sees_one_of_two_dies():
    gpu = gpu_named("mi250x")
    assert gpu.memory_bytes == 64 * 2**30
    assert gpu.peak_flops["bf16"] == 383e12 / 2


# What is only approximate is never passed off as known.


def test_an_approximate_peak_is_not_among_the_known_ones():
    a10g = gpu_named("a10g")
    assert "bf16" not in a10g.peak_flops
    assert a10g.ridge("bf16") is None
    assert a10g.figure("bf16").approximate
    assert a10g.ridge_figure("bf16").show(digits=0) == "~117"


def test_a_ridge_point_is_approximate_when_the_bandwidth_is():
    b200 = gpu_named("b200")
    assert not b200.figure("bf16").approximate
    assert b200.memory_bytes_per_s is None
    assert b200.ridge("bf16") is None
    assert b200.ridge_figure("bf16").approximate


def test_unknown_tensor_core_formats_are_not_no_tensor_core_formats():
    assert gpu_named("apple-m5").has_tensor_cores("fp16") is None
    assert gpu_named("apple-m4-max").has_tensor_cores("fp16") is False


def test_what_nobody_publishes_is_none():
    assert gpu_named("gaudi2").figure("fp16") is None
    assert gpu_named("gaudi2").ridge_figure("fp16") is None
