"""The fused casts, in Triton's interpreter, against the reference; test_cast_cuda.py runs them for real."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

triton = pytest.importorskip("triton")

from ampwise import cast  # noqa: E402
from ampwise.numbers.emulation.recipe import round_operand  # noqa: E402
from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, Format  # noqa: E402
from ampwise.numbers.formats.cast_launch import can_round, launch_cast  # noqa: E402

from ...for_each import for_each  # noqa: E402
from ...night import NIGHTLY  # noqa: E402
from .kernel_cases import (  # noqa: E402
    ALL,
    DTYPES,
    FUSED,
    SHAPES,
    WITHOUT_KERNEL,
    assert_same_bits,
    between,
    hard_values,
    nvfp4_ties,
    views,
)

# Triton's interpreter computes with numpy, which warns where a GPU would not.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled, not interpreted"),
]

NVFP4 = BLOCK_FORMATS["nvfp4"]
SCALES = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # every E4M3 beyond zero
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)  # of E2M1
TO_EVEN = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0], dtype=torch.float64)


def test_which_formats_there_is_a_kernel_for():
    assert {name for name, fmt in ALL.items() if not can_round(torch.ones(1), fmt)} == WITHOUT_KERNEL
    assert not can_round(torch.ones(1).double(), FORMATS["e4m3fn"]), "FP64 would lose bits before it is rounded"
    assert not can_round(torch.ones(1), replace(BLOCK_FORMATS["mxfp4"], block_size=24))
    eight_exponent_bits = replace(FORMATS["bf16"], mantissa_bits=3, bias=120, reserved_codes=2**3)
    assert not can_round(torch.ones(1), eight_exponent_bits), "neither FP32's exponents nor well inside"


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_to_nearest_as_the_reference(name, dtype):
    for values in hard_values(dtype, 520).values():
        for saturate in (False, True) if name in FORMATS else (False,):
            ours = launch_cast(values, FUSED[name], saturate=saturate)
            assert_same_bits(ours, cast(values, name, saturate=saturate))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4"])
def test_scales_that_are_rounded_up(name):
    fmt = replace(BLOCK_FORMATS[name], scales_up=True)
    for values in hard_values(torch.float32, 520).values():
        assert_same_bits(launch_cast(values, fmt), cast(values, fmt))


def test_the_256_values_of_a_square_of_a_weight():
    fmt = replace(NVFP4, block_size=256)
    for values in hard_values(torch.float32, 256 * 21).values():
        assert_same_bits(launch_cast(values.reshape(3, -1), fmt), cast(values.reshape(3, -1), fmt))
    assert not can_round(torch.ones(1), replace(NVFP4, four_over_six=True)), "which takes two casts"


@for_each("largest", [2688.0, 6.1, 3e38, 1.7e-30, 3.3e-41])
def test_quotients_that_are_ties_or_nearly(largest):
    values = nvfp4_ties(largest)
    assert_same_bits(launch_cast(values, BLOCK_FORMATS["nvfp4"]), cast(values, "nvfp4"))
    assert_same_bits(launch_cast(values.T, BLOCK_FORMATS["nvfp4"], dim=0), cast(values, "nvfp4").T)


@for_each("power", [0, 100, -120])
@for_each("off", [0.0, -1.0, 1.0])
def test_each_tie_goes_to_its_even_neighbour(off, power):
    """And what is a little off it where it belongs; 2688 is the largest value, so that every product is exact."""
    to_nearest = TIES + torch.where(TIES < 2, 0.25, torch.where(TIES < 4, 0.5, 1.0)) * off if off else TO_EVEN
    signs = torch.tensor([1.0, -1.0]).repeat(8)
    scales = SCALES[:, None] * 2.0**power
    given, expected = torch.zeros(2, len(scales), 16, dtype=torch.float64)
    given[:, :7], expected[:, :7] = TIES * (1 + off * 2.0**-12) * scales, to_nearest * scales
    given[:, 7:8] = expected[:, 7:8] = 6 * scales
    assert_same_bits(launch_cast(given.float() * signs, NVFP4), expected.float() * signs)


any_fp32 = st.integers(1, 0x7F7FFFFF).map(lambda bits: torch.tensor(bits, dtype=torch.int32).view(torch.float32).item())
makes_ties = st.builds(lambda few, power: 2688.0 * few * 2.0**power, st.integers(1, 63), st.integers(-130, 108))


@settings(max_examples=100 if NIGHTLY else 20)
@given(any_fp32 | makes_ties, st.integers(0, 4))
@example(torch.finfo(torch.float32).max, 0)
@example(torch.finfo(torch.float32).smallest_normal, 0)
@example(2.0**-149, 0)
@example(2688 * 2.0**-60, 0)
@example(2687 * 2.0**-60, 0)
def test_around_every_tie_of_any_scale(largest, first):
    values = _around_ties(largest, SCALES[first::5], ((SCALES[1:] + SCALES[:-1]) / 2)[first::5])
    assert_same_bits(launch_cast(values, NVFP4), cast(values, "nvfp4"))


def _around_ties(largest: float, scales: Tensor, middles: Tensor) -> Tensor:
    """Blocks of each scale with values at their ties, and blocks whose scales are at ties, ± the last bit of FP32."""
    whole = torch.tensor(largest / 2688).float().double()
    blocks = torch.zeros(3, len(scales) + len(middles), 16)
    blocks[:, : len(scales), :7] = _around(TIES * scales[:, None] * whole)
    blocks[:, : len(scales), 7] = (6 * scales * whole).float()
    blocks[:, len(scales) :, 0] = _around(6 * middles * whole)
    return torch.cat([torch.full((1, 16), largest), blocks.reshape(-1, 16).clamp(max=largest)])


def _around(exact: Tensor) -> Tensor:
    nearest = exact.float()
    return torch.stack([nearest, nearest.nextafter(torch.zeros(())), nearest.nextafter(torch.tensor(math.inf))])


@pytest.mark.half_by_day
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_that_are_not_finite_are_nan_and_leave_the_others_alone(dtype, dim):
    values = between(dtype, 300 * 16, -10, 10).reshape(300, 16)
    values[2], values[4], values[150, 1:] = 0.75, -0.0, 0.0
    finite = values.clone()
    for row, place, planted in ((0, 0, math.nan), (5, 15, math.inf), (140, 3, -math.inf), (299, 7, -math.nan)):
        values[row, place], finite[row] = planted, 0.0
    broken = [0, 5, 140, 299]
    expected = cast(finite, "nvfp4").index_fill(0, torch.tensor(broken), math.nan)
    lying = values if dim else values.T.contiguous()
    ours = launch_cast(lying, NVFP4, dim=dim)
    assert_same_bits(ours if dim else ours.T, expected)
    assert launch_cast(values[broken], NVFP4).isnan().all()


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 2100), (300, 33), (2, 20, 140)], ids=str)
def test_blocks_of_many_tiles_keep_their_own_scales(shape, dtype):
    values = between(dtype, math.prod(shape), -12, 12).reshape(shape)
    for dim in range(len(shape)):
        assert_same_bits(launch_cast(values, NVFP4, dim=dim), cast(values, "nvfp4", dim=dim))


@pytest.mark.few_by_day(5)
@pytest.mark.parametrize("name", ["e4m3fn", "mxfp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) < 4], ids=str)
def test_along_any_dimension_of_any_layout(name, shape):
    fmt = FUSED[name]
    for values in views(shape, torch.bfloat16).values():
        for dim in range(-1, max(len(shape) - 1, 0)) if name in BLOCK_FORMATS else (-1,):
            ours = launch_cast(values, fmt, dim=dim, dtype=torch.float32)
            assert_same_bits(ours, round_operand(values, fmt, dim, scaled=False))


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e5m2fnuz", "e2m1", "fp16", "bf16"])
def test_scaled_by_the_largest(name):
    for label, values in hard_values(torch.float32, 1100).items():
        expected = round_operand(values, FUSED[name], -1, scaled=True)
        assert_same_bits(launch_cast(values, FUSED[name], scaled=True), expected)
        if label != "any bits":
            narrow = values.bfloat16()
            expected = round_operand(narrow, FUSED[name], -1, scaled=True)
            assert_same_bits(launch_cast(narrow, FUSED[name], scaled=True, dtype=torch.float32), expected)


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("name", FUSED)
def test_by_chance_the_mean_is_kept_and_values_of_the_format_stay(name):
    fmt, samples = FUSED[name], 2**13
    scalar = fmt if isinstance(fmt, Format) else fmt.element
    pairs = ((1.0, 1.0 + scalar.epsilon), (0.0, scalar.smallest), (scalar.smallest, 2 * scalar.smallest))
    for low, high in pairs if scalar.lowest_exponent > -126 else pairs[:1]:
        values = torch.full((samples,), low + 0.25 * (high - low))
        if scalar is not fmt:
            values = values.reshape(-1, fmt.block_size)
            values[:, 0] = scalar.max  # makes the block's scale a power of two
        drawn = launch_cast(values, fmt, stochastic=True, generator=torch.Generator().manual_seed(3))
        if scalar is not fmt:
            torch.testing.assert_close(drawn[:, 0], values[:, 0], rtol=1e-6, atol=0)
            drawn = drawn[:, 1:]
        count = drawn.numel()
        ups = torch.isclose(drawn, torch.tensor(high), rtol=1e-6, atol=0).sum().item()
        downs = torch.isclose(drawn, torch.tensor(low), rtol=1e-6, atol=0).sum().item()
        assert ups + downs == count
        assert abs(ups - count / 4) < 5 * math.sqrt(count * 0.25 * 0.75)
    on_grid = launch_cast(torch.linspace(-3, 3, 640), fmt)
    assert torch.equal(launch_cast(on_grid, fmt, stochastic=True), on_grid)


def test_chances_are_repeatable_and_differ_from_place_to_place():
    values = torch.full((70, 70), 1.03)
    torch.manual_seed(5)
    first, second = (launch_cast(values, FORMATS["e4m3fn"], stochastic=True) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(launch_cast(values, FORMATS["e4m3fn"], stochastic=True), first)
    assert not torch.equal(first, second)
    ups = (first > 1.03).double()
    assert abs(torch.corrcoef(torch.stack([ups[:, :-1].flatten(), ups[:, 1:].flatten()]))[0, 1]) < 0.1
    assert abs(torch.corrcoef(torch.stack([ups[:-1].flatten(), ups[1:].flatten()]))[0, 1]) < 0.1


def test_what_is_not_finite_or_beyond_stays_so_by_chance():
    values = torch.tensor([math.nan, math.inf, -math.inf, 1e6, -0.0])
    e5m2, e4m3 = (launch_cast(values, FORMATS[name], stochastic=True) for name in ("e5m2", "e4m3fn"))
    assert_same_bits(e5m2, cast(values, "e5m2"))
    assert_same_bits(e4m3, cast(values, "e4m3fn"))
    for name in ("mxfp4", "nvfp4"):
        assert launch_cast(values[:4].repeat(8), BLOCK_FORMATS[name], stochastic=True).isnan().all()


def test_a_dimension_that_is_not_there():
    with pytest.raises(IndexError):
        launch_cast(torch.ones(3), BLOCK_FORMATS["mxfp8_e4m3"], dim=1)
