"""A format's limits, derived from its bits, against three libraries that state them."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, BlockFormat, find_format

from ...for_each import for_each
from . import oracles

NUMPY_DTYPES = {"fp64": np.float64, "fp32": np.float32, **oracles.NUMPY_DTYPES}
UP_TO_16_BITS = [name for name, fmt in FORMATS.items() if fmt.bits <= 16]
IN_TORCH = [name for name, fmt in FORMATS.items() if hasattr(torch, fmt.torch_dtype or "?")]

each_format = pytest.mark.parametrize("name", FORMATS)


def decoded(name: str) -> np.ndarray:
    """What each code of a format means, by its bit pattern, says ml_dtypes."""
    fmt = FORMATS[name]
    storage = np.uint16 if fmt.bits > 8 else np.uint8
    with np.errstate(all="ignore"):
        return np.arange(fmt.codes, dtype=storage).view(NUMPY_DTYPES[name]).astype(np.float64)


def test_every_format_has_an_oracle_here_but_tf32():
    assert set(FORMATS) - set(NUMPY_DTYPES) == {"tf32"}


@for_each("name", NUMPY_DTYPES)
def test_limits_are_what_numpy_and_ml_dtypes_say(name):
    fmt, info = FORMATS[name], ml_dtypes.finfo(NUMPY_DTYPES[name])
    assert fmt.bits == info.bits
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal) == float(info.tiny)
    assert fmt.smallest == float(info.smallest_subnormal)
    assert fmt.epsilon == float(info.eps)


@for_each("name", IN_TORCH)
def test_limits_are_what_torch_says(name):
    fmt = FORMATS[name]
    info = torch.finfo(getattr(torch, fmt.torch_dtype))
    assert (fmt.bits, fmt.max, fmt.smallest_normal) == (info.bits, info.max, info.tiny)
    if name != "e5m2fnuz":  # torch 2.13 says 0.125; after 1 its own codes go on with 1.25
        assert fmt.epsilon == info.eps


def test_tf32_is_fp32_with_the_mantissa_of_fp16():
    tf32, fp32, fp16 = (FORMATS[name] for name in ("tf32", "fp32", "fp16"))
    assert (tf32.smallest_normal, tf32.bytes_per_value) == (fp32.smallest_normal, fp32.bytes_per_value)
    assert (tf32.epsilon, tf32.bits) == (fp16.epsilon, 19)
    assert tf32.max == (2 - tf32.epsilon) * 2.0**127


@for_each("name", UP_TO_16_BITS)
def test_limits_are_those_of_the_decoded_codes(name):
    fmt, values = FORMATS[name], decoded(name)
    finite = values[np.isfinite(values)]
    positive = np.unique(finite[finite > 0])
    assert len(values) == fmt.codes
    assert positive.max() == fmt.max
    assert positive.min() == fmt.smallest
    assert np.isinf(values).any() == fmt.infinities
    assert np.isnan(values).any() == fmt.nans
    assert (finite < 0).any() == fmt.signed
    assert (finite == 0).any() == fmt.subnormals, "the subnormals' exponent is where zero lives"
    assert positive[positive > 1][0] - 1 == fmt.epsilon
    normal = positive[positive >= fmt.smallest_normal]
    gaps = np.diff(normal) / np.exp2(np.floor(np.log2(normal[:-1])))
    assert (gaps == fmt.epsilon).all(), "from the smallest normal up, every value has full precision"


@for_each("name", UP_TO_16_BITS)
def test_reserved_codes_are_those_without_a_finite_value(name):
    fmt, values = FORMATS[name], decoded(name)
    positive_half = values[: fmt.codes // (2 if fmt.signed else 1)]
    assert (~np.isfinite(positive_half)).sum() == fmt.reserved_codes
    assert np.isnan(values[fmt.codes // 2]) == fmt.nan_at_negative_zero


def test_the_two_smallest_of_fp16():
    """5.96e-8 is often called the smallest FP16; it is the smallest subnormal."""
    fp16 = FORMATS["fp16"]
    assert fp16.smallest_subnormal == 2.0**-24 == pytest.approx(5.96e-8, rel=1e-3)
    assert fp16.smallest_normal == 2.0**-14 == pytest.approx(6.10e-5, rel=1e-3)
    assert fp16.flush_exponent == -25
    assert np.float16(2.0**-25) == 0
    assert np.float16(np.nextafter(2.0**-25, 1)) == np.float16(2.0**-24)


@for_each("name", ["fp32", "fp16", "bf16", "e5m2"])
def test_thresholds_are_where_a_cast_changes_its_answer(name):
    fmt, dtype = FORMATS[name], NUMPY_DTYPES[name]
    inside = np.nextafter(fmt.overflow_threshold, 0)
    assert fmt.overflow_at_threshold
    with np.errstate(over="ignore"):
        assert np.isinf(np.float64(fmt.overflow_threshold).astype(dtype))
        if name in ("fp32", "fp16"):  # ml_dtypes rounds FP64 to FP32 first, which makes `inside` the threshold
            assert np.float64(inside).astype(dtype) == fmt.max


def test_the_threshold_of_e4m3_is_a_tie_that_stays_inside():
    e4m3 = FORMATS["e4m3fn"]
    assert (e4m3.overflow_threshold, e4m3.overflow_at_threshold) == (464.0, False)
    assert np.float32(464).astype(ml_dtypes.float8_e4m3fn) == 448
    assert np.isnan(np.nextafter(np.float32(464), np.float32(500)).astype(ml_dtypes.float8_e4m3fn))


def test_fp64_has_no_room_above_its_largest_value():
    assert FORMATS["fp64"].overflow_threshold == math.inf


@each_format
def test_the_overflow_threshold_lies_inside_its_binade(name):
    fmt = FORMATS[name]
    assert 2.0**fmt.overflow_binade <= fmt.max < fmt.overflow_threshold
    if name != "fp64":
        assert fmt.overflow_threshold < 2.0 ** (fmt.overflow_binade + 1)


@each_format
def test_derived_numbers_agree_with_each_other(name):
    fmt = FORMATS[name]
    assert fmt.smallest <= fmt.smallest_normal < fmt.max
    assert fmt.smallest_normal == 2.0**fmt.lowest_exponent
    assert fmt.bytes_per_value * 8 >= fmt.bits
    assert fmt.decimal_digits == pytest.approx(-math.log10(fmt.epsilon / 2))
    if fmt.flush_exponent is not None:
        assert math.ldexp(1.0, fmt.flush_exponent + 1) == fmt.smallest


def test_which_formats_need_a_loss_scale():
    without = {name for name, fmt in FORMATS.items() if not fmt.needs_loss_scale}
    assert without == {"fp64", "fp32", "tf32", "bf16", "e8m0"}
    assert not any(fmt.needs_loss_scale for fmt in BLOCK_FORMATS.values())


@for_each(
    ("name", "element", "scale", "size", "bits"),
    [
        ("mxfp8_e4m3", "e4m3fn", "e8m0", 32, 8.25),
        ("mxfp8_e5m2", "e5m2", "e8m0", 32, 8.25),
        ("mxfp6_e3m2", "e3m2", "e8m0", 32, 6.25),
        ("mxfp6_e2m3", "e2m3", "e8m0", 32, 6.25),
        ("mxfp4", "e2m1", "e8m0", 32, 4.25),
        ("nvfp4", "e2m1", "e4m3fn", 16, 4.5),
    ],
)
def test_block_formats(name, element, scale, size, bits):
    fmt = BLOCK_FORMATS[name]
    assert (fmt.element.name, fmt.scale.name, fmt.block_size) == (element, scale, size)
    assert (fmt.bits_per_value, fmt.bytes_per_value) == (bits, bits / 8)
    assert fmt.max == FORMATS[element].max * FORMATS[scale].max
    assert fmt.smallest == FORMATS[element].smallest * FORMATS[scale].smallest
    assert fmt.tensor_scale == (name == "nvfp4")


@for_each("name", [*FORMATS, *BLOCK_FORMATS])
def test_as_data(name):
    fmt = find_format(name)
    data = fmt.as_dict()
    assert data["kind"] == ("block" if isinstance(fmt, BlockFormat) else "scalar")
    for key in data.keys() - {"kind", "aliases", "element", "scale", "decimal_digits", "overflow_threshold"}:
        assert data[key] == getattr(fmt, key), key
    assert tuple(data["aliases"]) == fmt.aliases
    assert all(not isinstance(value, float) or math.isfinite(value) for value in data.values())
    assert fmt.since
    assert fmt.training.endswith(".")
