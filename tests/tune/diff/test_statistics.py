"""Numbers of a comparison are right: against FP64 by hand, and where the error was put there on purpose."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.tune.diff import statistics
from ampwise.tune.diff.statistics import Ledger

from ...for_each import for_each

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def measured(a, b, *factors):
    ledger = Ledger()
    ledger.add("x", a, b, *factors)
    return ledger.settled()["x"]


def backwards(tensor):
    """Another layout of the same memory."""
    return tensor.permute(tuple(reversed(range(tensor.ndim))))


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_it_is_what_fp64_says(dtype_a, dtype_b, shape, seed, turned):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(shape, generator=generator).to(dtype_a)
    b = (a.double() * (1 + 0.01 * torch.randn(shape, generator=generator))).to(dtype_b)
    if turned:
        a, b = backwards(a), backwards(b)
    found = measured(a, b)
    wide_a, wide_b = a.double(), b.double()
    error = wide_b - wide_a
    assert found.norm_a == pytest.approx(wide_a.norm().item(), rel=1e-14)
    assert found.norm_b == pytest.approx(wide_b.norm().item(), rel=1e-14)
    assert found.norm_error == pytest.approx(error.norm().item(), rel=1e-14)
    assert found.relative == pytest.approx((error.norm() / wide_a.norm()).item(), rel=1e-14)
    cosine = (wide_a.flatten() @ wide_b.flatten() / wide_a.norm() / wide_b.norm()).item()
    assert found.cosine == pytest.approx(cosine, abs=1e-15 * a.numel())
    assert found.largest_error == error.abs().max().item()
    assert error[found.largest_at].abs().item() == found.largest_error
    assert (found.largest_a, found.largest_b) == (wide_a.abs().max().item(), wide_b.abs().max().item())
    if found.relative:
        assert found.snr_db == pytest.approx(20 * math.log10(wide_a.norm() / error.norm()), rel=1e-12)


@pytest.mark.parametrize("most", [1, 3, 7, 64])
def test_pieces_make_no_difference(most, monkeypatch):
    a, b = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    pairs = [(a, b), (backwards(a), backwards(b)), (backwards(a), backwards(b).contiguous())]
    wholes = [measured(*pair) for pair in pairs]
    monkeypatch.setattr(statistics, "PIECE_ON_CPU", most)
    for whole, parts in zip(wholes, [measured(*pair) for pair in pairs], strict=True):
        assert parts.largest_at == whole.largest_at
        assert parts.norm_error == pytest.approx(whole.norm_error, rel=1e-14)
        assert (parts.zeros_a, parts.largest_a) == (whole.zeros_a, whole.largest_a)


def test_an_error_that_was_put_there():
    a = torch.full((8, 16), 3.0)
    b = a.clone()
    b[5, 7] += 4.0
    found = measured(a, b)
    assert found.norm_error == 4.0
    assert (found.largest_error, found.largest_at) == (4.0, (5, 7))
    assert found.relative == pytest.approx(4 / (3 * math.sqrt(128)), rel=1e-15)
    turned = measured(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))
    assert (turned.cosine, turned.relative) == (0.0, pytest.approx(5 / 3))


def test_an_angle_is_right_where_squares_would_cancel():
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    b = torch.tensor([math.cos(1e-6), math.sin(1e-6)], dtype=torch.float64)
    assert 1 - measured(a, b).cosine == pytest.approx(5e-13, rel=1e-3)


def test_tiny_and_huge_values_do_not_leave_the_range():
    tiny = torch.full((10,), 1e-30)
    assert measured(tiny, 2 * tiny).relative == pytest.approx(1.0)
    huge = torch.full((10,), 1e30)
    assert measured(huge, 1.5 * huge).relative == pytest.approx(0.5)


def test_what_is_not_finite_is_counted_and_reported():
    a = torch.tensor([1.0, 2.0, 3.0, -math.inf])
    masked = measured(a, a + torch.tensor([0.0, 0.0, 0.3, 0.0]))
    assert (masked.bad_a, masked.bad_b) == (1, 1)
    assert masked.relative == pytest.approx(0.3 / math.sqrt(14), rel=1e-6)  # a mask on both sides is no error
    overflowed = measured(a, torch.tensor([1.0, math.nan, math.inf, -math.inf]))
    assert (overflowed.bad_a, overflowed.bad_b, overflowed.relative) == (1, 3, math.inf)
    assert (overflowed.cosine, overflowed.snr_db) == (None, None)


@for_each("other", [[-math.inf, 1.0], [math.nan, 1.0], [2.0, math.inf], [2.0, math.nan]])
def test_what_is_not_finite_has_to_be_the_same_at_the_same_place(other):
    found = measured(torch.tensor([math.inf, 1.0]), torch.tensor(other))
    assert (found.bad_a, found.bad_b, found.relative) == (1, 1, math.inf)
    assert found.bad_apart == (1 if math.isinf(other[0]) or math.isnan(other[0]) else 2)
    both = torch.tensor([math.nan, -math.inf])
    assert measured(both, both.double()).relative == 0.0


def test_zeros_and_what_is_lost():
    a = torch.tensor([0.0, 1e-9, 1e-9, 1.0])
    found = measured(a, a.half())
    assert (found.zeros_a, found.zeros_b) == (1, 3)
    assert found.lost_share == pytest.approx(2 / 3)
    nothing = measured(torch.zeros(3), torch.zeros(3))
    assert (nothing.relative, nothing.cosine, nothing.lost_share) == (0.0, None, 0.0)
    assert measured(torch.zeros(3), torch.ones(3)).relative == math.inf


def test_whole_numbers_are_the_same_or_others():
    a = torch.tensor([1, 2, 3, 4])
    assert measured(a, a.clone()).changed == 0
    assert measured(a, torch.tensor([1, 3, 2, 4])).changed == 2
    assert measured(torch.tensor([True, False]), torch.tensor([True, True])).changed == 1
    assert measured(a.float(), a.float()).changed is None


def test_scales_are_undone():
    gradient = torch.randn(20)
    found = measured(gradient * 1024, gradient * 65536, (1 / 1024, 1 / 65536))
    assert found.relative == 0.0
    assert found.norm_a == pytest.approx(gradient.double().norm().item(), rel=1e-12)


def test_all_are_read_at_once_in_any_order():
    ledger = Ledger()
    for number in range(5):
        ledger.add(number, torch.ones(number), torch.ones(number) * 2)
    found = ledger.settled()
    assert [found[number].values for number in range(5)] == list(range(5))
    assert [found[number].norm_error for number in range(5)] == pytest.approx([math.sqrt(n) for n in range(5)])
    assert 3 in ledger
    assert Ledger().settled() == {}
