"""Block formats against a reference that goes block by block and value by value, and the laws of MX."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ampwise import cast
from ampwise.numbers.formats import BLOCK_FORMATS

from .by_value import GRIDS, nearest

MX_FORMATS = [name for name, fmt in BLOCK_FORMATS.items() if not fmt.tensor_scale]

each_format = pytest.mark.parametrize("name", BLOCK_FORMATS)
each_mx_format = pytest.mark.parametrize("name", MX_FORMATS)


def floor_log2(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    guess = numerator.bit_length() - denominator.bit_length()
    return guess if Fraction(value) >= Fraction(2) ** guess else guess - 1


def mx_scale(block: list[float], element: str) -> float:
    largest = max(map(abs, block))
    if largest == 0:
        return 2.0**-127
    return 2.0 ** min(max(floor_log2(largest) - floor_log2(GRIDS[element][-1]), -127), 127)


def nvfp4_tensor_scale(finite_blocks: list[list[float]]) -> float:
    largest = max((abs(value) for block in finite_blocks for value in block), default=0.0)
    with np.errstate(all="ignore"):
        scale = float(np.float32(largest / (6 * 448)))
    return min(scale, float(np.finfo(np.float32).max)) or 1.0


def nvfp4_scale(block: list[float], tensor_scale: float) -> float:
    wanted = max(map(abs, block)) / 6 / tensor_scale
    return (nearest(wanted, "e4m3fn") or 2.0**-9) * tensor_scale


def reference(array: np.ndarray, name: str) -> np.ndarray:
    size, element = BLOCK_FORMATS[name].block_size, BLOCK_FORMATS[name].element.name
    width = array.shape[-1] if array.ndim else 1
    rows = [[float(value) for value in row] for row in array.reshape(-1, width)] if array.size else []
    blocks = [[row[start : start + size] for start in range(0, width, size)] for row in rows]
    finite = [block for row in blocks for block in row if all(map(math.isfinite, block))]
    whole = nvfp4_tensor_scale(finite) if name == "nvfp4" else None
    done: list[float] = []
    for block in (block for row in blocks for block in row):
        if not all(map(math.isfinite, block)):
            done += [math.nan] * len(block)
            continue
        scale = mx_scale(block, element) if whole is None else nvfp4_scale(block, whole)
        done += [nearest(value / scale, element) * scale for value in block]
    with np.errstate(all="ignore"):
        return np.array(done, np.float64).reshape(array.shape).astype(array.dtype)


def assert_as_reference(array: np.ndarray, name: str) -> None:
    ours = cast(torch.from_numpy(array.copy()), name).numpy()
    expected = reference(array, name)
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    np.testing.assert_array_equal(ours, expected)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(ours[known]), np.signbit(expected[known]))


@st.composite
def tensors(draw, dtype=np.float32):
    """Blocks of very different sizes: empty ones, tiny ones, huge ones, with now and then a value of any kind."""
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    if shape:
        shape = (*shape[:-1], draw(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 70])))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    low, high = draw(st.sampled_from([(0, 0), (-3, 3), (-10, 10), (-150, -120), (110, 128), (-149, 128)]))
    with np.errstate(all="ignore"):
        values = random.uniform(-2, 2, shape) * np.exp2(random.integers(low, high + 1, shape).astype(np.float64))
        values = np.asarray(values).astype(dtype)
    if draw(st.booleans()):
        values = np.where(random.uniform(size=shape) < 0.1, values, dtype(0))  # mostly zeros
    flat = values.flatten()
    if flat.size and draw(st.booleans()):
        anything = st.tuples(st.integers(0, flat.size - 1), st.floats(width=8 * flat.itemsize))
        for place, value in draw(st.lists(anything, max_size=4)):
            flat[place] = value
    return flat.reshape(shape)


@pytest.mark.half_by_day
@each_format
@given(data=st.data())
def test_any_tensor_as_the_reference(name, data):
    assert_as_reference(data.draw(tensors()), name)


@pytest.mark.half_by_day
@each_format
@given(data=st.data())
def test_any_fp64_tensor_as_the_reference(name, data):
    assert_as_reference(data.draw(tensors(np.float64)), name)


@each_format
@pytest.mark.parametrize("largest", [2.0**-149, 2.0**-140, 2.0**-126, 6.1, 3.4028234663852886e38])
def test_the_ends_of_fp32(name, largest):
    values = np.array([largest, -largest / 3, 0.0, 2.0**-149, 1.0 if largest > 1 else 0.0], np.float32)
    assert_as_reference(values, name)


@each_format
def test_fp64_beyond_every_scale_saturates(name):
    values = np.array([1e300, -1e300, 1.0])
    assert_as_reference(values, name)
    assert np.isfinite(cast(torch.from_numpy(values), name).numpy()).all()


@each_format
def test_ties_of_a_block_go_to_even(name):
    grid = GRIDS[BLOCK_FORMATS[name].element.name]
    ties = [(low + high) / 2 for low, high in pairwise(grid)]
    fmt = BLOCK_FORMATS[name]
    rows = []
    for start in range(0, len(ties), fmt.block_size - 1):
        # The largest element in each block makes its scale 1 (in NVFP4: 448 times the tensor's).
        part = [grid[-1], *ties[start : start + fmt.block_size - 1]]
        rows.append(part + [0.0] * (fmt.block_size - len(part)))
    values = np.array(rows, np.float32)
    if not fmt.tensor_scale:
        expected = [[nearest(value, fmt.element.name) for value in row] for row in rows]
        assert cast(torch.from_numpy(values), name).tolist() == expected
    assert_as_reference(values, name)


@each_format
def test_a_value_that_is_not_finite_takes_its_block_with_it(name):
    size = BLOCK_FORMATS[name].block_size
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.ones(2, 2 * size + 3)
        values[1, size] = bad
        lost = cast(values, name).isnan()
        assert lost[1, size : 2 * size].all()
        assert lost.sum() == size


@each_format
def test_a_block_of_zeros_stays_zero(name):
    values = torch.tensor([0.0, -0.0]).repeat(20)
    result = cast(values, name)
    assert torch.equal(result, values)
    assert torch.equal(result.signbit(), values.signbit())


@each_format
def test_blocks_lie_along_the_last_dimension(name):
    values = torch.randn(7, 45, generator=torch.Generator().manual_seed(0))
    if name == "nvfp4":  # one scale for the whole tensor: rows know of each other
        values[:, 0] = 10.0
    rows = torch.stack([cast(row, name) for row in values])
    assert torch.equal(cast(values, name), rows)
    assert torch.equal(cast(values.T.contiguous().T, name), rows)


@each_mx_format
@given(data=st.data())
def test_mx_twice_is_mx_once(name, data):
    once = cast(torch.from_numpy(data.draw(tensors())), name)
    twice = cast(once, name)
    assert torch.equal(once.nan_to_num(nan=7.0), twice.nan_to_num(nan=7.0))


@each_mx_format
@given(seed=st.integers(0, 2**32), power=st.integers(-60, 60), width=st.integers(1, 80))
def test_mx_follows_a_power_of_two(name, seed, power, width):
    random = np.random.default_rng(seed)
    values = torch.from_numpy(random.standard_normal((2, width)) * np.exp2(random.integers(-15, 15, (2, width))))
    assert torch.equal(cast(values * 2.0**power, name), cast(values, name) * 2.0**power)


def test_nvfp4_has_two_levels_of_scale():
    """The largest block's scale is 448 times the tensor's, so that its largest value is kept."""
    values = torch.cat([torch.full((16,), 6 * 448.0), torch.full((16,), 3.0), torch.full((16,), 2.0**-9)])
    assert torch.equal(cast(values, "nvfp4"), values), "with scales of 448, 0.5 and 2**-9, and elements 6, 6 and 1"
    assert cast(torch.full((16,), 2.0**-11), "nvfp4")[0] == pytest.approx(2.0**-11), "alone, it sets the scale"
    tiny = torch.cat([values[:16], torch.full((16,), 2.0**-11)])
    assert (cast(tiny, "nvfp4")[16:] == 0).all(), "beside a large one it is below the smallest element"


@pytest.mark.half_by_day
@each_format
def test_stochastic_rounding_keeps_the_mean_of_a_block(name):
    fmt = BLOCK_FORMATS[name]
    top, low, high = GRIDS[fmt.element.name][-1], *GRIDS[fmt.element.name][1:3]
    value = low + 0.25 * (high - low)
    samples = 40_000
    blocks = torch.full((samples, fmt.block_size), value, dtype=torch.float64)
    blocks[:, 0] = top
    if fmt.tensor_scale:
        blocks = torch.nn.functional.pad(blocks, (0, 16), value=0.0)
        blocks[:, 16] = 448 * 6.0  # makes the tensor's scale 1, and that of the first block with it
    rounded = cast(blocks, name, "stochastic", generator=torch.Generator().manual_seed(1))
    drawn = rounded[:, 1 : fmt.block_size]
    assert set(drawn.unique().tolist()) == {low, high}
    sigma = (high - low) * math.sqrt(0.25 * 0.75 / drawn.numel())
    assert abs(drawn.mean().item() - value) < 5 * sigma
    assert (rounded[:, 0] == top).all()


@each_mx_format
def test_scales_that_are_rounded_up_cut_nothing_off(name):
    """OCP's rule, where it cuts off nothing; twice its scale, where it would."""
    fmt, (low, high) = BLOCK_FORMATS[name], torch.tensor([-20.0, 20.0])
    size, largest = fmt.block_size, GRIDS[fmt.element.name][-1]
    generator = torch.Generator().manual_seed(0)
    exponents = (high - low) * torch.rand(200, 1, generator=generator) + low
    values = torch.randn(200, size, generator=generator) * torch.exp2(exponents)
    plain, up = cast(values, fmt), cast(values, replace(fmt, scales_up=True))
    for block, by_ocp, wider in zip(values.double(), plain, up, strict=True):
        amax = float(block.abs().max())
        scale = 2.0 ** (floor_log2(amax) - floor_log2(largest))
        if amax / scale <= largest:
            assert torch.equal(by_ocp, wider)
        else:
            expected = [nearest(float(value) / (2 * scale), fmt.element.name) * 2 * scale for value in block]
            assert wider.tolist() == expected
    cut_off = (plain.abs() < values.abs().amax(1, keepdim=True) * 0.95) & (
        values.abs() == values.abs().amax(1, keepdim=True)
    )
    assert cut_off.any() or fmt.element.name == "e2m3", "OCP's rule does cut off"
