"""Stochastic rounding: the mean is kept, only neighbours are drawn, values on the grid stay."""

import math
import os

import numpy as np
import pytest
import torch

from ampwise import cast
from ampwise.numbers.formats import FORMATS

from ...for_each import for_each

SAMPLES = 200_000 if "AMPWISE_NIGHTLY" in os.environ else 40_000
NARROW = ["fp16", "bf16", "tf32", "e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz", "e3m2", "e2m3", "e2m1"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def places(name: str) -> dict[str, tuple[float, float, float]]:
    """Neighbours on the grid and a share of the way between them, in each part of the range."""
    fmt = FORMATS[name]
    step = fmt.smallest
    return {
        "normal": (1.0, 1.0 + fmt.epsilon, 0.3),
        "next power of two": (2.0 - fmt.epsilon, 2.0, 0.75),
        "subnormal": (step, 2 * step, 0.25),
        "at the smallest normal": (fmt.smallest_normal - step, fmt.smallest_normal, 0.5),
        "far up": (fmt.max - 2.0 ** (fmt.overflow_binade - fmt.mantissa_bits), fmt.max, 0.9),
        "below the smallest": (0.0, step, 0.75),
        "well below the smallest": (0.0, step, 0.125),
        "far below the smallest": (0.0, step, 2.0**-9),
    }


@pytest.mark.half_by_day
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_mean_is_kept(name, sign, dtype):
    for place, (low, high, share) in places(name).items():
        value = torch.tensor(sign * (low + share * (high - low)), dtype=dtype)
        drawn = cast(value.expand(SAMPLES), name, "stochastic", generator=seeded()).double()
        ups = (drawn.abs() == high).sum().item()
        downs = (drawn.abs() == low).sum().item()
        assert ups + downs == SAMPLES, f"{place}: something other than a neighbour was drawn"
        assert (drawn.signbit() == (sign < 0)).all() or FORMATS[name].nan_at_negative_zero
        exact = (abs(value.item()) - low) / (high - low)
        sigma = math.sqrt(SAMPLES * exact * (1 - exact))
        assert abs(ups - SAMPLES * exact) < 5 * sigma, f"{place}: {ups} up of {SAMPLES}, {exact:.4f} expected"


@for_each("name", [name for name in NARROW if name != "tf32"])
def test_only_neighbours_are_drawn(name):
    fmt = FORMATS[name]
    random = np.random.default_rng(5)
    exponents = random.uniform(math.log2(fmt.smallest) - 4, math.log2(fmt.max), 2**16)
    values = torch.from_numpy(np.exp2(exponents) * random.choice([-1.0, 1.0], 2**16)).clamp(-fmt.max, fmt.max)
    drawn = cast(values, name, "stochastic", generator=seeded())
    step = torch.ldexp(
        torch.ones_like(values), (torch.frexp(values)[1] - 1).clamp(min=fmt.lowest_exponent) - fmt.mantissa_bits
    )
    down, up = torch.floor(values / step) * step, torch.ceil(values / step) * step
    assert ((drawn == down) | (drawn == up)).all()
    assert (drawn != cast(values, name)).any()


@for_each("name", [name for name in FORMATS if name not in ("fp64", "fp32")])
@for_each("dtype", [torch.float32, torch.float64])
def test_values_on_the_grid_stay(name, dtype):
    values = torch.randn(2**14, generator=seeded(3), dtype=dtype)
    values *= torch.exp2(torch.randint(-30, 16, values.shape, generator=seeded(4)))
    on_grid = cast(values, name, saturate=True)
    for seed in range(3):
        again = cast(on_grid, name, "stochastic", generator=seeded(seed))
        assert torch.equal(again.nan_to_num(nan=7.0), on_grid.nan_to_num(nan=7.0))


def test_zero_infinity_and_nan_stay():
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    drawn = cast(values.repeat(1000), "fp16", "stochastic", generator=seeded()).reshape(-1, 5)
    assert (drawn[:, :4] == values[:4]).all()
    assert torch.equal(drawn[:, :2].signbit(), values[:2].signbit().expand(1000, 2))
    assert drawn[:, 4].isnan().all()


def test_past_the_largest_value_the_next_one_is_infinity():
    drawn = cast(torch.full((4000,), 65512.0), "fp16", "stochastic", generator=seeded())
    assert set(drawn.tolist()) == {65504.0, math.inf}
    saturated = cast(torch.full((4000,), 65512.0), "fp16", "stochastic", saturate=True, generator=seeded())
    assert set(saturated.tolist()) == {65504.0}


def test_a_generator_makes_it_repeatable():
    values = torch.randn(10_000, generator=seeded(9))
    first, again, other = (cast(values, "bf16", "stochastic", generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_a_generator_it_follows_manual_seed():
    values = torch.randn(1000, generator=seeded(9))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        first = cast(values, "e4m3fn", "stochastic")
        torch.manual_seed(4)
        assert torch.equal(cast(values, "e4m3fn", "stochastic"), first)


def test_each_value_is_drawn_for_itself():
    drawn = cast(torch.full((1000,), 1 + 2.0**-11), "fp16", "stochastic", generator=seeded())
    assert len(drawn.unique()) == 2
