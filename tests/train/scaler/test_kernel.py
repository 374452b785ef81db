"""The kernels that end a step, in Triton's interpreter, against their definitions; test_gpu.py runs them for real."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from ampwise import census
from ampwise.numbers.census.kernel import CHUNK
from ampwise.numbers.census.launch import launch_census
from ampwise.train.scaler import kernel
from ampwise.train.scaler.grad_stats import GpuStats, decide_step, decision_numbers
from ampwise.train.scaler.kernel import (
    launch_check,
    launch_decision,
    launch_totals,
    launch_update_scale_,
)
from ampwise.train.scaler.loss_scale import LARGEST, ScaleLimits, UpdateField, new_counters, update_scale_

from ...for_each import for_each
from ...night import NIGHTLY

# Triton's interpreter computes with numpy, which warns where a GPU would not.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled, not interpreted"),
]


def gradients(bad=()):
    """Several dtypes, an empty one, one of several chunks; ``bad`` values are planted in different tensors."""
    generator = torch.Generator().manual_seed(0)
    kinds = ((7, torch.float32), (CHUNK + 5, torch.float32), (0, torch.float32), (3000, torch.bfloat16))
    found = [torch.randn(size, generator=generator).to(dtype) for size, dtype in (*kinds, (1, torch.float32))]
    for tensor, value in zip((found[1], found[3], found[4]), bad, strict=False):
        tensor[-1] = value
    return found


@cache
def counted(scale, bad=()):
    """The count of these, which in the interpreter takes most of a second."""
    return launch_census(gradients(bad), None if scale is None else torch.tensor(scale))


def totals_by_hand(tensors, scale, weights):
    doubles = [tensor.double() / (scale or 1.0) for tensor in tensors]
    finite = [double[double.isfinite()].square().sum().item() for double in doubles]
    return [
        math.fsum(weight * squares for weight, squares in zip(weights, finite, strict=True)),
        sum(double.isinf().sum().item() for double in doubles),
        sum(double.isnan().sum().item() for double in doubles),
    ]


BAD = [(), (math.inf,), (math.nan,), (math.inf, math.nan, -math.inf)]


@pytest.mark.half_by_day
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_totals_are_sums_over_tensors_each_with_its_weight(bad):
    tensors = gradients(bad)
    for weights in (None, (0.5, 0.25, 1.0, 2.0, 0.125)):
        right = totals_by_hand(tensors, 1024.0, weights or (1.0,) * 5)
        found = launch_totals(counted(1024.0, bad), weights)
        assert found.dtype == torch.float64
        assert found[0].item() == pytest.approx(right[0], rel=2e-6)
        assert found[1:].tolist() == right[1:]


def test_more_tensors_and_chunks_than_one_block_are_all_added_up(monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 8)
    tensors = [torch.full((1,), 2.0)] * 30
    for place, value in ((3, math.inf), (8, math.nan), (29, -math.inf)):
        tensors[place] = torch.tensor([value])
    weights = tuple(1.0 + index % 2 for index in range(len(tensors)))
    found = launch_census(tensors)
    assert launch_totals(found, None).tolist() == [4.0 * 27, 2.0, 1.0]
    assert launch_check(tensors, None, 1.0)[1].numbers[1].item() == 1.0
    finite = sum(weight for tensor, weight in zip(tensors, weights, strict=True) if tensor.isfinite())
    assert launch_totals(found, weights).tolist() == [4.0 * finite, 2.0, 1.0]


@pytest.mark.few_by_day(6)
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("max_norm", [math.inf, 1e9, 1.0, 1e-3, 1e-37])
@pytest.mark.parametrize("scale", [None, 65536.0, 1000.0])
def test_the_kernel_judges_as_defined(scale, max_norm, bad):
    there = None if scale is None else torch.tensor(scale)
    right = decide_step(launch_totals(counted(scale, bad), None), there, max_norm)
    _, found = launch_check(gradients(bad), there, max_norm)
    # A number passed to a kernel is FP32, which costs ``max_norm`` a rounding.
    torch.testing.assert_close(found.numbers, right.numbers, rtol=2e-7, atol=0, equal_nan=True)
    assert found.found_inf.item() == right.found_inf.item()
    assert right.found_inf.item() == float(bool(bad) or (max_norm == 1e-37))


@for_each(
    "totals",
    [(25.0, 0.0, 0.0), (4.0, 2.0, 0.0), (4.0, 0.0, 1.0), (4.0, 2.0, 1.0), (1e76, 0.0, 0.0)],
)
@for_each("max_norm", [math.inf, 1.0, 1e-37])
@for_each("scale", [None, 1000.0])
def test_totals_that_ranks_agreed_on_are_judged_as_defined(scale, max_norm, totals):
    there, agreed = None if scale is None else torch.tensor(scale), torch.tensor(totals, dtype=torch.float64)
    found, right = launch_decision(agreed, there, max_norm), decide_step(agreed, there, max_norm)
    torch.testing.assert_close(found.numbers, right.numbers, rtol=2e-7, atol=0, equal_nan=True)
    assert found.found_inf.item() == right.found_inf.item()


def test_squares_beyond_fp64_are_judged_as_defined():
    agreed = torch.tensor([math.inf, 0.0, 0.0], dtype=torch.float64)
    for scale, max_norm in (
        (torch.tensor(1000.0), 1.0),
        (torch.tensor(1000.0), math.inf),
        (None, 1.0),
        (None, math.inf),
    ):
        found, right = launch_decision(agreed, scale, max_norm), decide_step(agreed, scale, max_norm)
        assert torch.equal(found.numbers, right.numbers)


@for_each("loss", [0.5, math.nan, math.inf, -math.inf])
@for_each("scale", [None, 1000.0])
def test_a_bad_loss_skips_a_step_of_finite_gradients_if_asked(scale, loss):
    there, given = None if scale is None else torch.tensor(scale), torch.tensor(loss)
    totals = launch_totals(counted(scale, ()), None).tolist()
    for skips in (True, False):
        _, found = launch_check(gradients(()), there, 1.0, given, skip_bad_loss=skips)
        right = decision_numbers(totals, there, 1.0, skips=skips and not math.isfinite(loss))
        torch.testing.assert_close(found.numbers[:5], torch.tensor(right), rtol=2e-7, atol=0)
        torch.testing.assert_close(found.numbers[5], given, equal_nan=True)


def test_an_empty_batch_has_norm_zero():
    assert launch_check([torch.zeros(0)], None, 1.0)[1].numbers.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("unscale", [True, False])
def test_gradients_of_every_layout_are_read_by_the_kernel_and_unscaled_where_they_lie(unscale):
    tensors = [torch.randn(4, 6).t(), torch.randn(6, 8)[::2, 1::3], torch.randn(9)[1:], torch.zeros(0, 2)]
    tensors += [torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last), torch.randn(5).bfloat16()]
    before, versions = [tensor.clone() for tensor in tensors], [tensor._version for tensor in tensors]
    factor = 1 / torch.tensor(1000.0)
    right = [(tensor.float() * factor).to(tensor.dtype) for tensor in tensors]
    part = GpuStats([0, 1, 2, 3, 4, 5], tensors, torch.tensor(1000.0), unscale)
    assert all(map(torch.equal, tensors, right if unscale else before))
    changed = [tensor._version > version for tensor, version in zip(tensors, versions, strict=True)]
    assert changed == [unscale] * 6  # what autograd and are_unchanged_in() go by
    seen = [census(each if unscale else tensor.float() * factor) for each, tensor in zip(right, before, strict=True)]
    assert part.fetch() == seen
    assert part.totals(None)[0].item() == pytest.approx(sum(each.sum_squares for each in seen), rel=2e-6)


LIMITS = {
    "torch's": ScaleLimits(growth=2.0, backoff=0.5, interval=2, floor=1e-30, ceiling=LARGEST, hysteresis=1),
    "all at once": ScaleLimits(growth=1.7, backoff=0.3, interval=3, floor=0.5, ceiling=300.0, hysteresis=2),
    "narrow": ScaleLimits(growth=3.0, backoff=0.25, interval=1, floor=32.0, ceiling=128.0, hysteresis=3),
    "to FP32's end": ScaleLimits(growth=1e15, backoff=0.9, interval=1, floor=1.0, ceiling=LARGEST, hysteresis=1),
    "floor FP32 rounds down": ScaleLimits(growth=1.1, backoff=0.3, interval=2, floor=0.7, ceiling=50.1, hysteresis=1),
}


# Losses by turns; None: not known.
LOSSES = {"unknown": [None], "of all kinds": [1.0, math.nan, None, math.inf, -2.0], "always NaN": [math.nan]}


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize(
    ("name", "optimizers", "stepped", "move", "losses"),
    [(name, 3, 2, True, "unknown") for name in LIMITS]
    + [("all at once", 1, 1, True, "of all kinds"), ("all at once", 1, 0, True, "unknown")]
    + [("all at once", 3, 3, False, "of all kinds"), ("narrow", 3, 1, False, "unknown")]
    + [("narrow", 3, 3, True, "of all kinds"), ("narrow", 1, 1, True, "always NaN")],
)
def test_the_kernel_moves_the_scale_as_defined(name, optimizers, stepped, move, losses):
    generator = torch.Generator().manual_seed(0)
    state = [torch.tensor(64.0), torch.tensor(0, dtype=torch.int32), new_counters(torch.device("cpu"), 0, 5, 7)]
    mirror = [tensor.clone() for tensor in state]
    stuck = 0
    for turn in range(60 if NIGHTLY else 40):
        often = 0.9 if turn % 20 < 10 else 0.05
        if losses == "always NaN":
            often = 1.0
        loss = LOSSES[losses][turn % len(LOSSES[losses])]
        loss = None if loss is None else torch.tensor(loss, dtype=(torch.float32, torch.float64)[turn % 2])
        found = (torch.rand(optimizers, generator=generator) < often).float()
        outcomes = torch.stack([torch.rand(optimizers, generator=generator), found], dim=1)
        facts = launch_update_scale_(*state, outcomes, stepped, LIMITS[name], move=move, loss=loss)
        right = update_scale_(*mirror, outcomes, stepped, LIMITS[name], move=move, loss=loss)
        torch.testing.assert_close(facts, right, rtol=0, atol=0, equal_nan=True)  # the last may be a NaN loss
        assert all(map(torch.equal, state, mirror)), turn
        stuck += int(right[UpdateField.STUCK])
    assert (state[0].dtype, state[1].dtype) == (torch.float32, torch.int32)
    assert stuck or not move or name not in ("narrow", "all at once", "floor FP32 rounds down")


def test_the_kernel_is_stuck_at_a_floor_that_fp32_rounds_up():
    limits = replace(LIMITS["torch's"], floor=0.1)
    for advance in (update_scale_, launch_update_scale_):
        state = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), new_counters(torch.device("cpu"))
        facts = advance(*state, torch.tensor([[1.0, 1.0]]), 1, limits, move=True)
        assert facts[UpdateField.STUCK].item() == 1.0, advance
