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


TABLES = DOCUMENT["device"]


def rate(gpu: Gpu, fmt: str) -> float | None:
    """A peak for comparing, approximate or not."""
    figure = gpu.figure(fmt)
    return None if figure is None else figure.value


def breaking(things, law):
    """The ids of those for which a law does not hold."""
    return [thing["id"] if isinstance(thing, dict) else thing.id for thing in things if not law(thing)]


def test_a_table_has_only_known_keys():
    assert breaking(TABLES, lambda table: set(table) <= KEYS) == []


def test_a_number_is_either_known_or_approximate_and_then_explained():
    for table in TABLES:
        known = {*table.get("tflops", {}), *(UNITS.keys() & table.keys())}
        assert not known & table.get("approximate", {}).keys(), table["id"]
    assert breaking(TABLES, lambda table: table.get("note") or not table.get("approximate")) == []


def test_every_source_is_a_url_and_used():
    used = {key for table in TABLES for key in table["sources"]}
    assert used == set(DOCUMENT["sources"])
    assert breaking(gpus(), lambda gpu: gpu.sources and all(each.startswith("https://") for each in gpu.sources)) == []


def test_names_of_formats_and_vendors_are_known():
    assert breaking(gpus(), lambda gpu: gpu.vendor in VENDORS) == []
    assert breaking(gpus(), lambda gpu: {*(gpu.tensor_core_formats or ()), *gpu.peak_flops} <= FORMATS) == []
    known = FORMATS | {"memory_bytes", "memory_bytes_per_s"}
    assert breaking(gpus(), lambda gpu: set(gpu.approximate) <= known) == []


def test_capability_is_of_the_vendors_kind():
    def is_plausible(gpu):
        if gpu.vendor == "nvidia":
            return gpu.compute_capability is not None and (5, 0) < gpu.compute_capability < (20, 0)
        is_known = gpu.capability.startswith("gfx") or gpu.capability in BACKENDS
        return gpu.compute_capability is None and is_known

    assert breaking(gpus(), is_plausible) == []


def test_memory_is_plausible():
    for gpu in gpus():
        size, bandwidth = gpu.figure("memory_bytes"), gpu.figure("memory_bytes_per_s")
        assert 8 * 2**30 <= size.value <= 512 * 2**30, gpu.id
        assert 100e9 <= bandwidth.value <= 10e12, f"{gpu.id}: check the units"
        # Reading all of it once takes between ten milliseconds and half a second on anything sold.
        assert 0.005 < size.value / bandwidth.value < 0.5, gpu.id


def test_ridge_points_are_plausible():
    for gpu in gpus():
        for fmt in {*gpu.peak_flops, *gpu.approximate} & FORMATS:
            ridge = gpu.ridge_figure(fmt).value
            low, high = (50, 1500) if gpu.has_tensor_cores(fmt) and fmt not in {"fp32", "tf32"} else (5, 350)
            assert low < ridge < high, f"{gpu.name} {fmt}: {ridge:.2f} FLOP/byte, check the units"


def test_rates_have_the_ratios_of_their_units():
    """BF16 as FP16 from Ampere on, FP8 twice BF16, TF32 half of FP16."""
    since_ampere = [gpu for gpu in gpus() if gpu.compute_capability and gpu.compute_capability >= (8, 0)]
    with_fp8 = [gpu for gpu in gpus() if rate(gpu, "fp8")]
    with_tf32 = [gpu for gpu in gpus() if rate(gpu, "tf32") and gpu.id not in FP16_AS_SLOW_AS_TF32]
    assert min(map(len, (since_ampere, with_fp8, with_tf32))) > 15
    assert breaking(since_ampere, lambda gpu: rate(gpu, "bf16") == rate(gpu, "fp16")) == []
    for gpu in with_fp8:
        ratio = rate(gpu, "fp8") / rate(gpu, "bf16")
        assert ratio == pytest.approx(1 if gpu.id in FP8_NO_FASTER else 2, rel=0.02), gpu.id
    for gpu in with_tf32:
        assert rate(gpu, "tf32") / rate(gpu, "fp16") == pytest.approx(0.5, rel=0.02), gpu.id


def test_no_peak_without_the_units_for_it():
    """A narrow format has a rate of its own only where tensor cores take it; FP16 also has vector units."""
    for gpu in gpus():
        narrow = {"tf32", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"} & {*gpu.peak_flops, *gpu.approximate}
        assert all(gpu.has_tensor_cores(fmt) for fmt in narrow), gpu.id


def test_the_catalog_agrees_with_what_the_capability_says():
    nvidia = [gpu for gpu in gpus() if gpu.vendor == "nvidia"]
    assert len(nvidia) > 20
    for gpu in nvidia:
        for fmt in DOCUMENT["nvidia_tensor_cores"]:
            told = nvidia_tensor_cores(fmt, gpu.compute_capability)
            assert told in (None, gpu.has_tensor_cores(fmt)), (gpu.id, fmt)


def test_plain_data_is_json_and_has_only_certain_ridge_points():
    for gpu in gpus():
        assert json.loads(json.dumps(gpu.as_dict()))["id"] == gpu.id
        told = gpu.as_dict()["ridge_flop_per_byte"]
        assert told == {fmt: gpu.ridge(fmt) for fmt in FORMATS if gpu.ridge(fmt) is not None}, gpu.id


def test_a_gpu_can_be_pickled_copied_and_hashed():
    for gpu in gpus():
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
