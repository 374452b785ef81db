"""The kernels at the end of a step against their definitions, in Triton's interpreter; test_gpu.py runs them for real."""

import math

import pytest
import torch

pytest.importorskip("triton")

from ampwise.census.kernel import CHUNK
from ampwise.census.launch import launch_census
from ampwise.engine.kernel import BLOCK, launch_advance_, launch_judge, launch_totals
from ampwise.engine.scale import LARGEST, Fact, Limits, advance_, new_tally
from ampwise.engine.verdict import judge

# Triton's interpreter computes with numpy, which warns where a GPU would not.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled, not interpreted"),
]


def gradients(bad=()):
    """Several dtypes, an empty one, one of several chunks; ``bad`` values are planted in different tensors."""
    generator = torch.Generator().manual_seed(0)
    kinds = ((7, torch.float32), (2 * CHUNK + 5, torch.float32), (0, torch.float32), (3000, torch.bfloat16))
    found = [torch.randn(size, generator=generator).to(dtype) for size, dtype in (*kinds, (1, torch.float32))]
    for tensor, value in zip((found[1], found[3], found[4]), bad, strict=False):
        tensor[-1] = value
    return found


def totals_by_hand(tensors, scale, weights):
    doubles = [tensor.double() / (scale or 1.0) for tensor in tensors]
    finite = [double[double.isfinite()].square().sum().item() for double in doubles]
    return [
        math.fsum(weight * squares for weight, squares in zip(weights, finite, strict=True)),
        sum(double.isinf().sum().item() for double in doubles),
        sum(double.isnan().sum().item() for double in doubles),
    ]


BAD = [(), (math.inf,), (math.nan,), (math.inf, math.nan, -math.inf)]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_totals_are_sums_over_tensors_each_with_its_weight(bad):
    tensors = gradients(bad)
    counted = launch_census(tensors, torch.tensor(1024.0))
    for weights in (None, (0.5, 0.25, 1.0, 2.0, 0.125)):
        right = totals_by_hand(tensors, 1024.0, weights or (1.0,) * 5)
        found = launch_totals(counted, weights)
        assert found.dtype == torch.float64
        assert found[0].item() == pytest.approx(right[0], rel=2e-6)
        assert found[1:].tolist() == right[1:]


def test_more_tensors_and_chunks_than_one_block_are_all_added_up():
    tensors = [torch.full((1,), 2.0)] * (BLOCK + 30)
    tensors[3] = torch.tensor([math.inf])
    tensors[BLOCK] = torch.tensor([math.nan])
    tensors[BLOCK + 9] = torch.tensor([-math.inf])
    weights = tuple(1.0 + index % 2 for index in range(len(tensors)))
    counted = launch_census(tensors)
    assert launch_totals(counted, None).tolist() == [4.0 * (BLOCK + 27), 2.0, 1.0]
    finite = sum(weight for tensor, weight in zip(tensors, weights, strict=True) if tensor.isfinite())
    assert launch_totals(counted, weights).tolist() == [4.0 * finite, 2.0, 1.0]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("max_norm", [math.inf, 1e9, 1.0, 1e-3, 1e-37])
@pytest.mark.parametrize("scale", [None, 65536.0, 1000.0])
def test_the_kernel_judges_as_defined(scale, max_norm, bad):
    there = None if scale is None else torch.tensor(scale)
    counted = launch_census(gradients(bad), there)
    right = judge(launch_totals(counted, None), there, max_norm)
    found = launch_judge(counted, there, max_norm)
    # A number passed to a kernel is FP32, which costs ``max_norm`` a rounding.
    torch.testing.assert_close(found.numbers, right.numbers, rtol=2e-7, atol=0, equal_nan=True)
    assert found.found_inf.item() == right.found_inf.item()
    assert right.found_inf.item() == float(bool(bad) or (max_norm == 1e-37))


def test_an_empty_batch_has_norm_zero():
    assert launch_judge(launch_census([torch.zeros(0)]), None, 1.0).numbers.tolist() == [0.0, 0.0, 1.0, 1.0]


LIMITS = {
    "torch's": Limits(growth=2.0, backoff=0.5, interval=2, floor=1e-30, ceiling=LARGEST, hysteresis=1),
    "all at once": Limits(growth=1.7, backoff=0.3, interval=3, floor=0.5, ceiling=300.0, hysteresis=2),
    "narrow": Limits(growth=3.0, backoff=0.25, interval=1, floor=32.0, ceiling=128.0, hysteresis=3),
    "to FP32's end": Limits(growth=1e15, backoff=0.9, interval=1, floor=1.0, ceiling=LARGEST, hysteresis=1),
    "floor FP32 rounds down": Limits(growth=1.1, backoff=0.3, interval=2, floor=0.7, ceiling=50.1, hysteresis=1),
    "floor FP32 rounds up": Limits(growth=1.1, backoff=0.3, interval=2, floor=0.1, ceiling=50.1, hysteresis=1),
}
ROUNDED_UP = pytest.mark.xfail(
    strict=True, reason="the kernel compares the FP32 scale with the floor in FP64, and is never stuck above it"
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=ROUNDED_UP if name.endswith("up") else ()) for name in LIMITS]
)
@pytest.mark.parametrize(("optimizers", "stepped"), [(1, 1), (1, 0), (3, 3), (3, 2)])
@pytest.mark.parametrize("move", [True, False])
def test_the_kernel_moves_the_scale_as_defined(name, optimizers, stepped, move):
    if not move and name.endswith("up"):
        pytest.skip("the scale does not move")
    generator = torch.Generator().manual_seed(0)
    state = [torch.tensor(64.0), torch.tensor(0, dtype=torch.int32), new_tally(torch.device("cpu"), 0, 5, 7)]
    mirror = [tensor.clone() for tensor in state]
    stuck = 0
    for turn in range(60):
        often = 0.9 if turn % 20 < 10 else 0.05
        found = (torch.rand(optimizers, generator=generator) < often).float()
        outcomes = torch.stack([torch.rand(optimizers, generator=generator), found], dim=1)
        facts = launch_advance_(*state, outcomes, stepped, LIMITS[name], move=move)
        right = advance_(*mirror, outcomes, stepped, LIMITS[name], move=move)
        assert torch.equal(facts, right), turn
        assert all(map(torch.equal, state, mirror)), turn
        stuck += int(right[Fact.STUCK])
    assert (state[0].dtype, state[1].dtype) == (torch.float32, torch.int32)
    assert stuck or not move or name not in ("narrow", "all at once", "floor FP32 rounds down")
