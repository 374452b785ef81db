"""cast on a GPU gives what it gives on the CPU, bit for bit."""

import numpy as np
import pytest
import torch

from ampwise import cast
from ampwise.formats import BLOCK_FORMATS, FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

each_format = pytest.mark.parametrize("name", [*FORMATS, *BLOCK_FORMATS])


def any_bits(dtype: torch.dtype, count: int = 2**18) -> torch.Tensor:
    size = dtype.itemsize
    random = np.random.default_rng(size).integers(0, 256, count * size, dtype=np.uint8)
    return torch.from_numpy(random).view(dtype).reshape(-1, 2**9)


def moderate(dtype: torch.dtype, count: int = 2**18) -> torch.Tensor:
    """Values near the range of narrow formats: random bits alone would hardly ever leave a block finite."""
    random = np.random.default_rng(1)
    values = random.standard_normal(count) * np.exp2(random.uniform(-24, 10, count))
    return torch.from_numpy(values).to(dtype).reshape(-1, 2**9)


def assert_same_bits(there: torch.Tensor, here: torch.Tensor) -> None:
    there = there.cpu()
    assert there.dtype == here.dtype
    there, here = there.double(), here.double()
    assert torch.equal(there.isnan(), here.isnan())
    there, here = there.nan_to_num(nan=0.0), here.nan_to_num(nan=0.0)
    assert torch.equal(there, here)
    known = ~here.isnan()
    assert torch.equal(there.signbit()[known], here.signbit()[known])


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saturate", [False, True])
def test_nearest_as_on_the_cpu(name, dtype, saturate):
    for values in (any_bits(dtype), moderate(dtype)):
        assert_same_bits(cast(values.cuda(), name, saturate=saturate), cast(values, name, saturate=saturate))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_fp8_tensors_as_on_the_cpu(dtype):
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    for name in ("fp16", "e3m2", "e2m1"):
        assert_same_bits(cast(values.cuda(), name), cast(values, name))


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e2m1"])
def test_stochastic_draws_neighbours_and_keeps_the_mean(name):
    fmt, samples = FORMATS[name], 200_000
    for low, high in ((1.0, 1.0 + fmt.epsilon), (0.0, fmt.smallest), (fmt.smallest, 2 * fmt.smallest)):
        values = torch.full((samples,), low + 0.25 * (high - low), device="cuda")
        drawn = cast(values, name, "stochastic", generator=torch.Generator("cuda").manual_seed(0))
        ups = (drawn == high).sum().item()
        assert ups + (drawn == low).sum().item() == samples
        assert abs(ups - samples / 4) < 5 * (samples * 0.25 * 0.75) ** 0.5
