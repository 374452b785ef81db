"""Rounding to nearest, at every value and every tie, against ml_dtypes, gfloat, numpy and torch."""

import numpy as np
import pytest
import torch

from ampwise import cast
from ampwise.numbers.formats import FORMATS, Format

from .oracles import NUMPY_DTYPES

gfloat = pytest.importorskip("gfloat")
gfloat_formats = pytest.importorskip("gfloat.formats")

# gfloat has no FNUZ formats. Its E8M0 keeps zero and the sign and breaks ties by the exponent's parity, while
# ours, ml_dtypes' and torch's round ties up: it is no oracle there.
GFLOAT_FORMATS = {
    "fp16": gfloat_formats.format_info_binary16,
    "bf16": gfloat_formats.format_info_bfloat16,
    "e5m2": gfloat_formats.format_info_ocp_e5m2,
    "e4m3fn": gfloat_formats.format_info_ocp_e4m3,
    "e3m2": gfloat_formats.format_info_ocp_e3m2,
    "e2m3": gfloat_formats.format_info_ocp_e2m3,
    "e2m1": gfloat_formats.format_info_ocp_e2m1,
}
# torch before 2.7 lacks E8M0.
TORCH_DTYPES = {
    name: getattr(torch, FORMATS[name].torch_dtype)
    for name in NUMPY_DTYPES
    if FORMATS[name].torch_dtype and hasattr(torch, FORMATS[name].torch_dtype)
}

each_format = pytest.mark.parametrize("name", NUMPY_DTYPES)


@pytest.fixture(autouse=True)
def _numpy_may_overflow():
    with np.errstate(all="ignore"):
        yield


def decoded(name: str) -> np.ndarray:
    fmt = FORMATS[name]
    storage = np.uint16 if fmt.bits > 8 else np.uint8
    return np.arange(fmt.codes, dtype=storage).view(NUMPY_DTYPES[name]).astype(np.float64)


def hard_points(name: str, dtype: type) -> np.ndarray:
    """Every value, every tie, both neighbours of every tie, the edges and what lies beyond; both signs."""
    fmt, values = FORMATS[name], decoded(name)
    grid = np.unique(np.abs(values[np.isfinite(values)]))
    ties = (grid[1:] + grid[:-1]) / 2
    edges = np.array([fmt.overflow_threshold, fmt.max * 2, fmt.smallest / 2, fmt.smallest / 4])
    limits = np.finfo(dtype)
    ends = np.array([limits.smallest_subnormal, limits.tiny, limits.max, np.inf, np.nan, 0.0])
    centres = np.concatenate([grid, ties, edges]).astype(dtype)
    points = np.concatenate(
        [centres, np.nextafter(centres, dtype(np.inf)), np.nextafter(centres, dtype(0)), ends.astype(dtype)]
    )
    return np.concatenate([points, -points])


def rounded(values: np.ndarray, name: str | Format, **options) -> np.ndarray:
    return cast(torch.from_numpy(values), name, **options).numpy()


def assert_same(ours: np.ndarray, theirs: np.ndarray, inputs: np.ndarray) -> None:
    """The same values, NaN in the same places, zeros of the same sign."""
    same = np.where(np.isnan(ours), np.isnan(theirs), (ours == theirs) & (np.signbit(ours) == np.signbit(theirs)))
    wrong = np.flatnonzero(~same)[:5]
    assert same.all(), [(inputs[i].item(), ours[i].item(), theirs[i].item()) for i in wrong]


def ml_dtypes_says(values: np.ndarray, name: str) -> np.ndarray:
    """Through ml_dtypes, but for two things that ours does otherwise on purpose.

    A format without NaN keeps NaN as NaN in ours, so that it is not hidden; ml_dtypes makes it -0. And between
    2**-127 and 2**-126, where FP32 is subnormal, ml_dtypes rounds to E8M0 as if the lower one were 0.
    """
    through = values.astype(NUMPY_DTYPES[name]).astype(values.dtype)
    through = np.where(np.isnan(values), values.dtype.type(np.nan), through)
    if name == "e8m0":
        through = np.where((values > 2.0**-127) & (values < 1.5 * 2.0**-127), 2.0**-127, through)
    return through.astype(values.dtype)


@each_format
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_value_of_a_format_stays_where_it_is(name, dtype):
    values = decoded(name).astype(dtype)
    assert_same(rounded(values, name), values, values)
    assert_same(rounded(values, name, saturate=True), np.clip(values, -FORMATS[name].max, FORMATS[name].max), values)


@each_format
def test_hard_points_as_ml_dtypes(name):
    points = hard_points(name, np.float32)
    assert_same(rounded(points, name), ml_dtypes_says(points, name), points)


@each_format
def test_any_bits_as_ml_dtypes(name):
    points = np.random.default_rng(7).integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
    # Random exponents mostly miss a narrow format's range, so half of them are brought near it.
    near = np.random.default_rng(8).standard_normal(2**18).astype(np.float32) * np.float32(FORMATS[name].max / 4)
    for values in (points, near):
        assert_same(rounded(values, name), ml_dtypes_says(values, name), values)


@pytest.mark.parametrize("name", GFLOAT_FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("saturate", [False, True])
def test_hard_points_as_gfloat(name, dtype, saturate):
    """In FP64 the neighbours of a tie are nearer than FP32 can see: rounding twice would fail here."""
    fmt, points = FORMATS[name], hard_points(name, dtype)
    always = not (fmt.infinities or fmt.nans)
    theirs = gfloat.round_ndarray(GFLOAT_FORMATS[name], points.astype(np.float64), sat=saturate or always)
    assert_same(rounded(points, name, saturate=saturate), theirs.astype(dtype), points)


def test_fp64_to_fp16_as_numpy():
    scales = np.exp2(np.random.default_rng(3).uniform(-30, 17, 2**17))
    for points in (hard_points("fp16", np.float64), np.random.default_rng(4).standard_normal(2**17) * scales):
        assert_same(rounded(points, "fp16"), points.astype(np.float16).astype(np.float64), points)


def test_rounding_twice_would_be_seen():
    just_above_a_tie = 1 + 2.0**-11 + 2.0**-40
    assert float(np.float16(np.float32(just_above_a_tie))) == 1.0
    assert cast(torch.tensor(just_above_a_tie, dtype=torch.float64), "fp16").item() == 1 + 2.0**-10


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_hard_points_as_torch(name):
    """torch (2.13, CPU) differs in three places.

    It saturates casts to E4M3 even without being asked; older releases gave NaN there, so either is accepted.
    To E8M0 it takes the exponent of negative values and makes zero 2**-127; ours, like ml_dtypes, says NaN.
    And it shares ml_dtypes' E8M0 rounding of FP32 subnormals.
    """
    fmt, points = FORMATS[name], hard_points(name, np.float32)
    if name == "e8m0":
        points = points[~(points <= 0) & ~((points > 2.0**-127) & (points < 2.0**-126))]
    theirs = torch.from_numpy(points).to(TORCH_DTYPES[name]).float().numpy()
    beyond = np.abs(points) > fmt.overflow_threshold
    if name == "e4m3fn":
        saturated = rounded(points, name, saturate=True)[beyond]
        assert ((theirs[beyond] == saturated) | np.isnan(theirs[beyond])).all()
        points, theirs = points[~beyond], theirs[~beyond]
    assert_same(rounded(points, name), theirs, points)


def test_what_e8m0_cannot_hold_is_nan():
    values = torch.tensor([0.0, -0.0, -1.0, -torch.inf, torch.inf, torch.nan])
    assert cast(values, "e8m0").isnan().all()
    assert cast(values, "e8m0", saturate=True).isnan().tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e8m0_rounds_to_the_nearer_power_and_ties_up(dtype):
    lowest = 2.0**-127
    values = torch.tensor([lowest / 8, lowest, 1.25 * lowest, 1.5 * lowest, 1.4, 1.5, 2.9, 3.0, 6.0], dtype=dtype)
    expected = [lowest, lowest, lowest, 2 * lowest, 1.0, 2.0, 2.0, 4.0, 8.0]
    assert cast(values, "e8m0").tolist() == expected


@pytest.mark.parametrize("name", ["e3m2", "e2m3", "e2m1"])
def test_formats_without_nan_keep_it_and_always_saturate(name):
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
    top = FORMATS[name].max
    for saturate in (False, True):
        kept = cast(values, name, saturate=saturate)
        assert kept[0].isnan()
        assert kept[1:].tolist() == [top, -top, top, -top]


# Targets as wide as FP32: numpy's frexp and rint are the reference, so no bits are handled here.


def on_grid(values: np.ndarray, mantissa_bits: int, lowest_exponent: int) -> np.ndarray:
    wide = values.astype(np.float64)
    _, exponent = np.frexp(wide)
    step = np.ldexp(1.0, np.maximum(exponent - 1, lowest_exponent) - mantissa_bits)
    return np.where(np.isfinite(wide), np.rint(wide / step) * step, wide)


def wide_points(dtype: type) -> np.ndarray:
    random = np.random.default_rng(11)
    points = [random.integers(0, 2**32, 2**17, dtype=np.uint32).view(np.float32).astype(dtype)]
    ties = (1 + (2 * np.arange(2**10) + 1) * 2.0**-11).astype(dtype)
    for power in (-150, -137, -136, -130, -126, -1, 0, 127):
        scaled = ties * dtype(2.0**power)
        points += [scaled, np.nextafter(scaled, dtype(np.inf)), np.nextafter(scaled, dtype(0))]
    points.append(np.array([0.0, np.inf, np.nan, np.finfo(np.float32).max, 2.0**-149, 2.0**-137], dtype))
    points.append(random.standard_normal(2**16).astype(dtype))
    everything = np.concatenate(points)
    return np.concatenate([everything, -everything])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tf32_as_floating_point_arithmetic_says(dtype):
    points = wide_points(dtype)
    expected = on_grid(points, 10, -126)
    expected = np.where(np.abs(expected) >= 2.0**128, np.copysign(np.inf, expected), expected)
    assert_same(rounded(points, "tf32"), expected.astype(dtype), points)


@pytest.mark.parametrize("mantissa_bits", [0, 1, 5])
def test_a_format_of_ones_own_with_the_range_of_fp32(mantissa_bits):
    """Without mantissa bits, FP32's subnormals lie between its zero and its first value."""
    own = Format(
        name="own", title="own", exponent_bits=8, mantissa_bits=mantissa_bits, bias=127,
        reserved_codes=2**mantissa_bits, infinities=True,
    )  # fmt: skip
    points = np.concatenate([wide_points(np.float32), np.float32(2.0**-127) * np.float32([0.9, 1, 1.1])])
    expected = on_grid(points, mantissa_bits, -126)
    expected = np.where(np.abs(expected) >= 2.0**128, np.copysign(np.inf, expected), expected)
    assert_same(rounded(points, own), expected.astype(np.float32), points)


def test_fp64_to_fp32_as_numpy():
    points = np.concatenate([wide_points(np.float64), [FORMATS["fp32"].overflow_threshold, 1e39, 2.0**-150]])
    assert_same(rounded(points, "fp32"), points.astype(np.float32).astype(np.float64), points)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", np.float32), ("fp64", np.float32), ("fp64", np.float64)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_format_that_holds_everything_changes_nothing(name, dtype, rounding):
    points = wide_points(dtype)
    assert_same(rounded(points, name, rounding=rounding), points, points)


# Other input dtypes: rounded as FP32, given back as they came.

NARROW_DTYPES = [dtype for name, dtype in TORCH_DTYPES.items() if name != "e8m0"]


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["fp32", "tf32", "fp64"])
def test_narrow_dtypes_pass_through_wider_formats(name, dtype):
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint8 if dtype.itemsize == 1 else torch.int32)
    values = (codes if dtype.itemsize == 1 else codes.to(torch.int16)).view(dtype)
    through = cast(values, name)
    assert through.dtype == dtype
    assert_same(through.float().numpy(), values.float().numpy(), values.float().numpy())


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["e2m1", "e3m2"])
def test_narrow_dtypes_are_rounded_as_their_values_in_fp32(name, dtype):
    values = torch.linspace(-5, 5, 101).to(dtype)
    through = cast(values, name)
    assert through.dtype == dtype
    assert torch.equal(through.float(), cast(values.float(), name))
