"""cast on a GPU, by its kernel and without, gives what it gives on the CPU, bit for bit."""

import math

import pytest
import torch

from ampwise import cast
from ampwise.numbers.emulation.recipe import round_operand
from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS
from ampwise.numbers.formats import cast as module

from .kernel_cases import ALL, DTYPES, FUSED, SHAPES, assert_same_bits, hard_values, nvfp4_ties, views

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

each_format = pytest.mark.parametrize("name", ALL)


@pytest.fixture(params=["kernel", "reference"])
def way(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr("ampwise.numbers.formats.cast.kernels_for", lambda *_: None)
    else:
        pytest.importorskip("triton")
    return request.param


@each_format
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("saturate", [False, True])
def test_nearest_as_on_the_cpu(way, name, dtype, saturate):
    for values in hard_values(dtype, 2**14 + 3).values():
        assert_same_bits(cast(values.cuda(), name, saturate=saturate), cast(values, name, saturate=saturate))


@pytest.mark.parametrize("name", FUSED)
def test_every_bf16_and_fp16_there_is(name):
    for dtype in (torch.bfloat16, torch.float16):
        values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        assert_same_bits(cast(values.cuda(), name), cast(values, name))


@pytest.mark.parametrize("largest", [2688.0, 6.1, 3e38, 1.7e-30, 3.3e-41])
def test_quotients_that_are_ties_or_nearly(largest):
    values = nvfp4_ties(largest)
    assert_same_bits(cast(values.cuda(), "nvfp4"), cast(values, "nvfp4"))
    assert_same_bits(cast(values.cuda().T, "nvfp4", dim=0), cast(values, "nvfp4").T)


@pytest.mark.parametrize("name", ["e4m3fn", "bf16", *BLOCK_FORMATS])
@pytest.mark.parametrize("shape", [*SHAPES, (513, 257), (64, 2048), (3, 129, 70), (300, 48)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_along_any_dimension_of_any_layout(name, shape, dtype):
    fmt = FUSED[name]
    for values in views(shape, dtype).values():
        for dim in range(-1, max(len(shape) - 1, 0)):
            for scaled in (False, True):
                on_gpu = round_operand(_moved(values), fmt, dim, scaled=scaled)
                assert_same_bits(on_gpu, round_operand(values, fmt, dim, scaled=scaled))


def _moved(values: torch.Tensor) -> torch.Tensor:
    """To the GPU, lying there as it lies here."""
    if 0 in values.stride():
        return values[:, :1].cuda().expand(values.shape)
    return values.cuda()


@pytest.mark.parametrize("name", [name for name in FUSED if name in FORMATS])
def test_scaled_by_the_largest(name):
    for dtype in DTYPES:
        for values in hard_values(dtype, 2**14 + 5).values():
            expected = round_operand(values, FUSED[name], -1, scaled=True)
            assert_same_bits(round_operand(values.cuda(), FUSED[name], -1, scaled=True), expected)


def test_hardware_casts_agree_where_there_are_some():
    values = hard_values(torch.float32, 2**20)
    for name, dtype in (("e4m3fn", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("bf16", torch.bfloat16)):
        for label in ("moderate", "ties", "zeros"):
            given = values[label].clamp(-400, 400).cuda()
            assert_same_bits(cast(given, name), given.to(dtype).float().cpu())


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_fp8_tensors_as_on_the_cpu(dtype):
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    for name in ("fp16", "e3m2", "e2m1"):
        assert_same_bits(cast(values.cuda(), name).float(), cast(values, name).float())


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e2m1"])
def test_stochastic_draws_neighbours_and_keeps_the_mean(way, name):
    fmt, samples = FORMATS[name], 200_000
    for low, high in ((1.0, 1.0 + fmt.epsilon), (0.0, fmt.smallest), (fmt.smallest, 2 * fmt.smallest)):
        values = torch.full((samples,), low + 0.25 * (high - low), device="cuda")
        drawn = cast(values, name, "stochastic", generator=torch.Generator("cuda").manual_seed(0))
        ups = (drawn == high).sum().item()
        assert ups + (drawn == low).sum().item() == samples
        assert abs(ups - samples / 4) < 5 * math.sqrt(samples * 0.25 * 0.75)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dim", [0, 1])
def test_stochastic_kernels_keep_the_mean_of_a_whole_tensor(name, dim):
    torch.manual_seed(0)
    values = torch.randn(257, 300, device="cuda").clamp(-4, 4)
    nearest, draws = cast(values, name, dim=dim), 200
    total, spread = torch.zeros_like(values, dtype=torch.float64), torch.zeros_like(values, dtype=torch.float64)
    for _ in range(draws):
        drawn = cast(values, name, "stochastic", dim=dim).double()
        total += drawn
        spread += (drawn - values) ** 2
    # Values beyond a block's largest saturate, and are the same in each draw.
    moved = spread / draws > (nearest.double() - values) ** 2 * (1 + 1e-9)
    error, sigma = (total / draws - values.double())[moved], (spread / draws / draws).sqrt()[moved]
    assert moved.float().mean() > 0.5
    assert abs((error / sigma).mean()) < 5 / math.sqrt(moved.sum())


def test_a_cuda_graph_draws_anew_each_time():
    pytest.importorskip("triton")
    values = torch.full((4096,), 1.03, device="cuda")
    cast(values, "e4m3", "stochastic")  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = cast(values, "e4m3", "stochastic")
    results = []
    for _ in range(3):
        graph.replay()
        results.append(drawn.clone())
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


def test_what_is_traced_or_mapped_over_takes_the_reference():
    values = torch.randn(4, 64, device="cuda")
    assert module.kernels_for(values, FORMATS["e4m3fn"]) is not None
    if torch.__version__ >= "2.12":  # before, there was no batching rule for view(dtype)
        mapped = torch.func.vmap(lambda row: cast(row, "e4m3"))(values)
        assert torch.equal(mapped, cast(values, "e4m3"))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert cast(mode.from_tensor(values), "e4m3").shape == (4, 64)
