"""Rounding to BF16: by chance without bias, or with the rest kept to the bit."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.train.low_bit.rounding import RoundingNoise, join_bf16_, split_bf16_, stochastic_round_

from ...for_each import for_each

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=True)
NOISE = st.integers(0, 2**16 - 1)


def bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def rounded(value, noise):
    return float(stochastic_round_(torch.tensor([value]), torch.tensor([noise], dtype=torch.int32))[0])


@given(FLOATS, NOISE)
def test_it_goes_to_one_of_the_two_neighbours(value, noise):
    towards_zero = bits(value) & 0xFFFF0000
    assert bits(rounded(value, noise)) in (towards_zero, towards_zero + 0x10000)


@given(st.integers(0, 2**16 - 1).filter(lambda upper: upper & 0x7FFF <= 0x7F80), NOISE)
def test_what_bf16_holds_stays(upper, noise):
    value = struct.unpack("<f", struct.pack("<I", upper << 16))[0]
    assert bits(rounded(value, noise)) == upper << 16
    held = torch.tensor([value])
    assert not split_bf16_(held).any()
    assert bits(float(held[0])) == upper << 16


@given(st.integers(0, 2**16 - 1).filter(lambda upper: upper & 0x7FFF < 0x7F80), st.integers(-(2**15), 2**15 - 1))
def test_a_number_joined_with_the_rest_of_another_is_still_about_itself(upper, rest):
    """Someone may have written to a weight since: less than BF16's step away, and never NaN."""
    value = torch.tensor([upper << 16], dtype=torch.int64).to(torch.int32).view(torch.float32)
    joined = join_bf16_(value.clone(), torch.tensor([rest], dtype=torch.int16))
    assert joined.isfinite().all()
    assert abs(bits(float(joined[0])) - (upper << 16)) <= 2**15


@given(st.floats(2**-100, 2**100, width=32) | st.floats(-(2.0**100), -(2.0**-100), width=32))
def test_on_average_it_is_the_value_itself(value):
    """Over all noise there is, exactly: no luck in it."""
    every = torch.arange(2**16, dtype=torch.int32)
    results = stochastic_round_(torch.full((2**16,), value), every).double()
    assert float(results.mean()) == value


@pytest.mark.parametrize("step", [2**-12, 3 * 2**-11])
def test_many_small_updates_add_up(step):
    """A walk of 1,000 steps of far less than BF16's at 1, which nearest would all lose."""
    weights, noise = torch.ones(4096), RoundingNoise()
    for _ in range(1000):
        weights += step
        stochastic_round_(weights, noise.like(weights))
    moved = float(weights.double().mean()) - 1
    assert moved == pytest.approx(1000 * step, rel=0.03)
    nearest = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        nearest += step
    assert float(nearest) == 1


@given(st.lists(FLOATS, min_size=1, max_size=50))
def test_a_value_is_its_nearest_and_the_rest(values):
    wide = torch.tensor(values)
    narrow = wide.clone()
    rest = split_bf16_(narrow)
    assert torch.equal(narrow, narrow.bfloat16().float())
    to_nearest = wide.bfloat16().float()
    ties = (wide.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(narrow[~ties], to_nearest[~ties])
    assert torch.equal(join_bf16_(narrow, rest).view(torch.int32), wide.view(torch.int32))


@for_each("pattern", [0x7FFFFFFF, 0x7F800001, 0x7FC00000, 0xFFFFFFFF - 2**32, 0xFF800001 - 2**32])
def test_a_nan_stays_one(pattern):
    """Whatever its bits: all ones are a GPU's own, and would overflow; some are all in the lower half."""
    values = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    assert stochastic_round_(values.clone(), torch.tensor([65535], dtype=torch.int32)).isnan().all()
    narrow = values.clone()
    rest = split_bf16_(narrow)
    assert narrow.bfloat16().isnan().all()
    assert join_bf16_(narrow, rest).isnan().all()


def test_noise_is_uniform_and_goes_by_how_much_was_drawn():
    noise = RoundingNoise()
    drawn = [noise.like(torch.empty(10_000)) for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1])
    again = RoundingNoise(drawn=1)
    assert torch.equal(again.like(torch.empty(10_000)), drawn[1])
    every = torch.cat(drawn).double()
    assert every.min() >= 0
    assert every.max() < 2**16
    assert float(every.mean()) == pytest.approx(2**15, rel=0.02)


def test_the_users_random_numbers_are_not_touched():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    RoundingNoise().like(torch.empty(100))
    assert torch.equal(torch.rand(3), expected)
