"""Formats: what 16 bits hold."""

import math

import pytest
import torch
from torch.nn.functional import softmax

from .claim import claim

FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@claim(
    "The smallest number of FP16 is 5.96e-8.",
    verdict="depends",
    truth="That is 2⁻²⁴, the smallest subnormal. The smallest normal number, which `torch.finfo(torch.float16).tiny` "
    "means, is 2⁻¹⁴, or 6.10e-5; below it, each halving takes a significant bit. What is 2⁻²⁵ or less becomes zero, "
    "and what is just above it 2⁻²⁴.",
    also=[
        "tests/numbers/formats/test_format.py::test_the_two_smallest_of_fp16",
        "tests/numbers/formats/test_format.py::test_thresholds_are_where_a_cast_changes_its_answer",
    ],
)
def test_the_smallest_of_fp16():
    first_code = torch.tensor([1], dtype=torch.int16).view(FP16).item()
    assert first_code == 2**-24 == pytest.approx(5.96e-8, rel=1e-3)
    assert torch.finfo(FP16).tiny == 2**-14 == pytest.approx(6.10e-5, rel=1e-3)
    assert torch.tensor([2**-25, 2**-25 * (1 + 2**-20)]).to(FP16).tolist() == [0, 2**-24]
    for halvings in range(11):
        smallest = 2.0 ** (-14 - halvings)
        above = torch.nextafter(torch.tensor(smallest).to(FP16), torch.tensor(1).to(FP16)).item()
        assert (above - smallest) / smallest == 2 ** (halvings - 10), "a bit less each time"


@claim(
    "1e-7 and 1.2e-7 become zero in FP16.",
    verdict="false",
    truth="Both become 1.19e-7, which is 2⁻²³. Further down, 3e-8 becomes 5.96e-8, and 2.98e-8 is lost.",
    also=["tests/numbers/formats/test_cast_contract.py::test_what_fp16_really_loses"],
)
def test_what_is_left_of_small_numbers():
    assert torch.tensor([1e-7, 1.2e-7]).to(FP16).tolist() == [2**-23, 2**-23]
    assert pytest.approx(1.19e-7, rel=2e-3) == 2**-23
    assert torch.tensor([3e-8, 2.98e-8]).to(FP16).tolist() == [2**-24, 0]


@claim(
    "In FP16, exp overflows above 88.",
    verdict="false",
    truth="Above 11.09, the logarithm of what FP16 can hold; 88.7 is where FP32 and BF16 end. CUDA's autocast "
    "computes `exp` in FP32, a CPU's leaves it in 16 bits.",
    also=["tests/rules/amp7xx_choice/test_facts.py::test_the_range_of_fp16"],
)
def test_where_exp_overflows(cuda):
    for dtype, limit in ((FP16, 11.09), (BF16, 88.7), (torch.float32, 88.7)):
        end = math.log(torch.finfo(dtype).max)
        assert end == pytest.approx(limit, abs=0.05)
        inputs = torch.tensor([end * 0.99, end * 1.01]).to(dtype)
        assert inputs.exp().isinf().tolist() == [False, True]
    assert cuda["exp"] == "float32"
    with torch.autocast("cpu", BF16):
        assert torch.zeros(2, dtype=BF16).exp().dtype == BF16


@claim(
    "BF16 is newer than FP16, so it is more accurate.",
    verdict="false",
    truth="It reaches as far as FP32 and has 8 significant bits; FP16 has 11 and ends at 65504. After 1 comes 1.0078 "
    "in BF16 and 1.00098 in FP16, and 256 + 1 is 256 in BF16.",
    also=["tests/numbers/formats/test_format.py::test_limits_are_what_torch_says"],
)
def test_bf16_has_range_and_fp16_has_bits():
    after_one = {
        dtype: torch.nextafter(torch.ones((), dtype=dtype), torch.full((), 2, dtype=dtype)).item()
        for dtype in (BF16, FP16)
    }
    assert after_one == {BF16: 1 + 2**-7, FP16: 1 + 2**-10}
    assert (round(after_one[BF16], 4), round(after_one[FP16], 5)) == (1.0078, 1.00098)
    assert torch.finfo(FP16).max == 65504
    assert torch.finfo(BF16).tiny == torch.finfo(torch.float32).tiny
    assert torch.finfo(BF16).max == pytest.approx(torch.finfo(torch.float32).max, rel=0.01)
    assert torch.tensor(256, dtype=BF16) + 1 == 256
    assert torch.tensor(256, dtype=FP16) + 1 == 257


@claim(
    "-1e9 masks attention scores in any precision.",
    verdict="false",
    truth="FP16 ends at -65504: `masked_fill(mask, -1e9)` raises, and a -1e9 that is cast is -inf, which makes NaN "
    "of a row that is masked as a whole. `torch.finfo(scores.dtype).min` is finite in every format, and leaves such a "
    "row uniform; but two such masks added are -inf again.",
)
def test_masks_in_fp16():
    scores, mask = torch.zeros(2, 4, dtype=FP16), torch.tensor([[True] * 4, [True, False, False, False]])
    with pytest.raises(RuntimeError, match="without overflow"):
        scores.masked_fill(mask, -1e9)
    cast = torch.where(mask, torch.tensor(-1e9).to(FP16), scores)
    assert cast[0].tolist() == [-math.inf] * 4
    assert softmax(cast, -1).isnan().all(-1).tolist() == [True, False]
    for dtype in (FP16, BF16, torch.float32):
        row = softmax(scores.to(dtype).masked_fill(mask, torch.finfo(dtype).min), -1)
        assert row[0].tolist() == [0.25] * 4
        assert row[1, 0] == 0
        assert 2 * torch.tensor(torch.finfo(dtype).min, dtype=dtype) == -math.inf


@claim(
    "An eps of 1e-8 keeps divisions safe.",
    verdict="depends",
    truth="In FP32 and BF16. In FP16 1e-8 is 0, and divides by zero: Adam with FP16 weights and its default eps "
    "makes NaN of a weight whose gradient is 0, and -inf of one whose squared gradient vanishes, in one step. With "
    "1e-4, or with weights in FP32, it does not.",
    also=["tests/rules/amp7xx_choice/test_facts.py::test_the_range_of_fp16"],
)
def test_eps_in_fp16():
    eps = {dtype: torch.tensor(1e-8).to(dtype).item() for dtype in (FP16, BF16, torch.float32)}
    assert eps[FP16] == 0 < min(eps[BF16], eps[torch.float32])
    assert str(after_adam(FP16).tolist()) == "[nan, -inf]"
    assert after_adam(FP16, eps=1e-4).isfinite().all()
    assert after_adam(torch.float32).isfinite().all()


def after_adam(dtype, **options):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    weight.grad = torch.tensor([0, 1e-4], dtype=dtype)
    torch.optim.Adam([weight], lr=1e-3, **options).step()
    return weight.detach()


@claim(
    "A matmul in FP16 is accumulated in FP16.",
    verdict="false",
    truth="It is accumulated in FP32 and rounded at the end, on a CPU and on CUDA, unless one asks for less "
    "(`allow_fp16_accumulation`). The end is where it overflows: a product of 70,000 ones is inf. Long sums may be "
    "rounded between their parts on CUDA, as `allow_fp16_reduced_precision_reduction` is on by default.",
)
def test_products_are_added_up_in_fp32(device):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(8, 3000, generator=generator).to(FP16).to(device) for _ in range(2))
    exact = (a.double() @ b.double().T).cpu()
    step = 2.0**-1  # between numbers of FP16 from 512 to 1024, where these sums are
    assert 512 < exact.min() < exact.max() < 1024
    assert ((a @ b.T).cpu().double() - exact).abs().max() <= 2 * step
    one_by_one = torch.zeros(8, 8, dtype=FP16)  # noqa: AMP408 (it shows that)
    for column in (a[:, None] * b).cpu().unbind(-1):
        one_by_one += column
    assert (one_by_one.double() - exact).abs().max() > 10 * step
    ones = torch.ones(1, 70_000, dtype=FP16, device=device)
    assert (ones @ ones.T).isinf().all()
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
