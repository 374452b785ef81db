"""The verdict against plain Python in FP64, and the coefficient against torch's own clipping."""

import math
import struct

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ampwise.train.scaler.grad_stats import CLIP_EPSILON, NO_CLIPPING, decide_step

from ...for_each import for_each


def totals(squares, infinities=0, nans=0):
    return torch.tensor([squares, infinities, nans], dtype=torch.float64)


def fp32(number):
    with numpy.errstate(over="ignore", under="ignore"):
        return float(numpy.float32(number))


def expected(squares, infinities, nans, scale, max_norm):
    """Norm, found_inf, divisor and grad_scale, from the definition."""
    norm = math.sqrt(squares)
    divisor = max((norm + 1e-6) / max_norm, 1.0)
    bad = infinities + nans > 0 or fp32(scale * divisor) == math.inf
    shown = math.nan if nans else math.inf if infinities else fp32(norm)
    return [shown, float(bad), 1.0 if bad else fp32(divisor), scale if bad else fp32(scale * divisor)]


def bits(numbers):
    """NaN equals itself."""
    return [struct.pack("f", number) for number in numbers]


@given(
    st.floats(0.0, 1e85),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([None, 1.0, 65536.0, 1000.0, fp32(1e30)]),
    st.sampled_from([NO_CLIPPING, 1.0, 0.3, 1e-3, 1e6, 1e-35]),
)
@example(1e80, 0, 0, 65536.0, 1e-3)  # the divisor is beyond FP32
@example(1.0, 0, 0, fp32(1e38), 0.1)  # the divisor is not, times the scale it is
@example(1.0, 1, 1, 4.0, 1.0)
def test_every_verdict_follows_from_its_totals(squares, infinities, nans, scale, max_norm):
    there = None if scale is None else torch.tensor(scale)
    verdict = decide_step(totals(squares, infinities, nans), there, max_norm)
    right = expected(squares, infinities, nans, scale or 1.0, max_norm)
    assert bits(verdict.numbers[:4].tolist()) == bits(right)
    assert verdict.applied.item() == 1.0 - verdict.found_inf.item()
    named = [verdict.norm, verdict.found_inf, verdict.divisor, verdict.grad_scale]
    assert bits([number.item() for number in named]) == bits(right)
    assert all(number.shape == () and number.dtype == torch.float32 for number in named)


@given(st.floats(0.0, 1e76), st.integers(0, 5), st.integers(0, 5), st.floats(1e-30, 1e30))
def test_found_inf_is_exactly_0_or_1_and_the_divisor_at_least_1(squares, infinities, nans, max_norm):
    verdict = decide_step(totals(squares, infinities, nans), torch.tensor(65536.0), max_norm)
    assert verdict.found_inf.item() in (0.0, 1.0)
    assert verdict.divisor.item() >= 1.0
    assert verdict.grad_scale.isfinite()


@for_each(("infinities", "nans", "shown"), [(0, 0, "5.0"), (3, 0, "inf"), (0, 2, "nan"), (3, 2, "nan")])
def test_nan_beats_infinity_beats_a_number(infinities, nans, shown):
    assert str(decide_step(totals(25.0, infinities, nans), None).norm.item()) == shown


def test_a_bad_verdict_divides_by_the_scale_alone():
    verdict = decide_step(totals(1e6, 1), torch.tensor(1000.0), 1.0)
    assert verdict.numbers[1:4].tolist() == [1.0, 1.0, 1000.0]


def test_without_clipping_gradients_are_divided_by_the_scale_alone():
    for squares in (0.0, 1.0, 1e76):
        assert decide_step(totals(squares), torch.tensor(1000.0), NO_CLIPPING).numbers[1:4].tolist() == [
            0.0,
            1.0,
            1000.0,
        ]
        assert decide_step(totals(squares), None, NO_CLIPPING).numbers[1:4].tolist() == [0.0, 1.0, 1.0]


def test_finite_gradients_are_not_skipped_because_their_squares_overflow_fp64():
    assert decide_step(totals(math.inf), torch.tensor(4.0), NO_CLIPPING).numbers[1:4].tolist() == [0.0, 1.0, 4.0]


@for_each("max_norm", [1e-3, 0.1, 1.0, 5.0, 1e3, math.inf])
@for_each("size", [1e-8, 1e-3, 1.0, 1e5])
def test_the_coefficient_is_that_of_clip_grad_norm(max_norm, size):
    weight = torch.nn.Parameter(torch.zeros(1000))
    weight.grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * size
    verdict = decide_step(totals(weight.grad.double().square().sum().item()), None, max_norm)
    ours = weight.grad / verdict.divisor
    norm = torch.nn.utils.clip_grad_norm_([weight], max_norm)
    torch.testing.assert_close(verdict.norm, norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, weight.grad, rtol=1e-6, atol=0)


def test_the_margin_is_torchs():
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([1e-7])
    torch.nn.utils.clip_grad_norm_([weight], 1e-8)  # where the margin is most of it
    assert weight.grad.item() == pytest.approx(1e-7 * 1e-8 / (1e-7 + CLIP_EPSILON), rel=1e-6)
    assert decide_step(totals(1e-14), None, 1e-8).divisor.item() == pytest.approx(1e-7 / weight.grad.item(), rel=1e-6)
