"""The cast to FP8 against torch's own casts, and the kernel, in Triton's interpreter, against the reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.train.float8.fp8_cast import (
    AMAX,
    E4M3,
    E5M2,
    LIMITS,
    SATURATED,
    TOPS,
    cast_reference,
    cast_to_fp8,
    recast_fp8_,
    scales_of,
)

from ...for_each import for_each

DTYPES = [E4M3, E5M2]
INF, NAN = math.inf, math.nan


def bits(tensor):
    return tensor.view(torch.uint8)


def current(x, dtype, rows=True, columns=True):
    return cast_to_fp8(x, None, e5m2=dtype is E5M2, rows=rows, columns=columns)


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32), st.sampled_from(DTYPES), st.integers(0, 3))
def test_the_scale_is_the_largest_power_of_two_that_fits(amax, dtype, margin):
    scale = float(scales_of(torch.tensor(amax), TOPS[dtype], margin))
    assert math.frexp(scale)[0] == 0.5
    limit = LIMITS[dtype] / 2**margin
    assert amax * scale <= limit
    assert amax * scale * 2 > limit or scale == 2.0**126


@for_each("dtype", DTYPES)
@for_each("amax", [0.0, 1e-45, 3.4e38, INF, NAN])
def test_scales_of_odd_magnitudes_are_normal_numbers(dtype, amax):
    scale = float(scales_of(torch.tensor(amax), TOPS[dtype]))
    assert 2.0**-126 <= scale <= 2.0**126


@for_each("dtype", DTYPES)
@for_each("wide", [torch.float32, torch.bfloat16, torch.float16])
@for_each("shape", [(32, 48), (5, 16), (17, 80)])
def test_values_are_those_of_torchs_cast_of_what_is_scaled(dtype, wide, shape):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 0.01).to(wide)
    found = current(x, dtype)
    scale = 1 / float(found.inverse)
    assert torch.equal(bits(found.rows), bits((x.float() * scale).to(dtype)))
    height, width = shape
    assert found.columns.shape == (width, -(-height // 16) * 16)
    assert torch.equal(bits(found.columns)[:, :height], bits(found.rows).t())
    assert not bits(found.columns)[:, height:].any()
    assert found.seen[AMAX] == x.abs().max().float()
    assert found.seen[SATURATED] == 0
    assert not found.sums.numel()
    sums = cast_to_fp8(x, None, e5m2=dtype is E5M2, rows=False, columns=False, sums=True).sums
    torch.testing.assert_close(sums, x.float().sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_wanted_is_not_made(dtype):
    x = torch.ones(16, 32)
    assert not current(x, dtype, rows=False).rows.numel()
    assert not current(x, dtype, columns=False).columns.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_a_scale_given_values_beyond_are_cut_off_and_counted(dtype):
    x = torch.tensor([[1.0, -3.0, 2.0, 0.0], [LIMITS[dtype], 1e30, -1e38, 5.0]])
    found = cast_to_fp8(x, torch.tensor(2.0), e5m2=dtype is E5M2, rows=True, columns=False)
    limit = LIMITS[dtype]
    assert found.rows.float().tolist() == [[2, -6, 4, 0], [limit, limit, -limit, 10]]
    assert (float(found.inverse), float(found.seen[SATURATED])) == (0.5, 3.0)
    assert found.seen[AMAX] == x.abs().max()


@for_each("dtype", DTYPES)
@for_each("bad", [INF, -INF, NAN])
def test_what_is_not_finite_shows(dtype, bad):
    x = torch.tensor([[1.0, bad], [2.0, 3.0]])
    found = current(x, dtype)
    assert found.inverse.isnan()
    assert found.rows.float().isnan().all()
    assert not found.seen[AMAX].isfinite()
    given = cast_to_fp8(x, torch.tensor(1.0), e5m2=dtype is E5M2, rows=True, columns=True)
    assert given.rows.float().isnan().tolist() == [[False, True], [False, False]]
    assert not given.seen[AMAX].isfinite()
    assert given.seen[SATURATED] == 0  # that is something else


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype):
    found = current(torch.zeros(16, 16), dtype)
    assert not bits(found.rows).any()
    assert found.seen[AMAX] == 0
    assert found.inverse.isfinite()


def exact(dtype, shape, scale):
    """Values that the format holds: Triton's interpreter rounds otherwise than a GPU."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    values = codes.view(dtype).float()
    return torch.where(values.isfinite(), values, 0.0) / scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_current", [True, False])
@pytest.mark.parametrize("shape", [(130, 80), (3, 48)])
def test_the_kernel_does_as_the_reference_does(dtype, is_current, shape):
    launch = pytest.importorskip("ampwise.train.float8.kernel").launch_cast
    torch.manual_seed(0)
    x = exact(dtype, shape, 64.0)
    x[0, 0], x[1, 1] = -0.0, LIMITS[dtype] / 64
    if not is_current:
        x[2, 2], x[2, 3] = 1e30, -1e30
    scale = None if is_current else torch.tensor(64.0)
    *expected, sums = cast_reference(x, scale, dtype is E5M2, True, True, True)
    *found, own_sums = launch(x, scale, dtype is E5M2, True, True, True)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(bits(ours.reshape(-1)), bits(theirs.reshape(-1)))
    assert (own_sums - sums).abs().max() <= 1e-6 * x.abs().sum(0).max()  # in another order


@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True)])
def test_the_kernel_writes_into_what_an_earlier_cast_has_returned(rows, columns):
    launch = pytest.importorskip("ampwise.train.float8.kernel").launch_cast
    torch.manual_seed(0)
    first, second = exact(E4M3, (130, 80), 64.0), exact(E4M3, (130, 80), 512.0)
    found = launch(first, None, False, rows, columns, False)
    assert all(
        a is b for a, b in zip(found[:3], launch(second, None, False, rows, columns, False, found), strict=False)
    )
    for ours, theirs in zip(found[:3], cast_reference(second, None, False, rows, columns), strict=False):
        assert torch.equal(bits(ours.reshape(-1)), bits(theirs.reshape(-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True)])
def test_a_cast_again_is_as_a_first_one(dtype, rows, columns):
    first, second = torch.randn(33, 48).to(dtype), torch.randn(33, 48).mul(1e-3).to(dtype)
    found = cast_to_fp8(first, None, e5m2=False, rows=rows, columns=columns)
    recast_fp8_(second, found)
    for ours, theirs in zip(found, cast_to_fp8(second, None, e5m2=False, rows=rows, columns=columns), strict=True):
        assert torch.equal(bits(ours.reshape(-1)), bits(theirs.reshape(-1)))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("is_current", [True, False])
def test_the_kernel_shows_what_is_not_finite(bad, is_current):
    launch = pytest.importorskip("ampwise.train.float8.kernel").launch_cast
    x = torch.ones(16, 32)
    x[3, 5] = bad
    _, _, inverse, seen, _ = launch(x, None if is_current else torch.tensor(1.0), False, True, True, False)
    assert not seen[AMAX].isfinite()
    assert bool(inverse.isnan()) is is_current
    assert seen[SATURATED] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 5, 4096, 10000])
@pytest.mark.parametrize("special", [None, -INF, NAN])
def test_the_kernel_for_magnitudes(monkeypatch, dtype, size, special):
    kernel = pytest.importorskip("ampwise.train.float8.kernel")
    monkeypatch.setattr(kernel, "AMAX_PROGRAMS", 2)  # so that each has several turns
    torch.manual_seed(0)
    x = torch.randn(size).to(dtype)
    x[-1] = -7.0 if special is None else special
    found, nothing = torch.zeros(2)
    kernel.launch_amax(x, found)
    kernel.launch_amax(x[:0], nothing)
    expected = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    assert nothing == 0
