"""Tensors that reach every corner of counting; used on the CPU, in Triton's interpreter and on a GPU."""

import math

import pytest
import torch


def wild_floats(count, seed=0):
    """Random bit patterns: every exponent, infinities, NaNs, subnormals, both signs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    return bits.view(torch.float32)


def hard_cases():
    torch.manual_seed(0)
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    return {
        "ordinary": torch.randn(5000) * 1e-4,
        "two chunks": torch.randn(65536 + 77) * 1e-3,
        "many blocks": torch.cat([torch.randn(300_000), wild_floats(5000, seed=1), torch.zeros(9000)]),
        "wild bits": wild_floats(3000),
        "zeros": torch.zeros(1000),
        "both zeros": torch.tensor([0.0, -0.0, 1.0]),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(-2.5),
        "powers of two": torch.cat([powers, -powers]),
        "just above powers of two": torch.nextafter(powers, torch.tensor(math.inf)),
        "subnormal": torch.randn(2000) * 1e-40,
        "a few subnormal": torch.cat([torch.randn(1000), torch.tensor([1e-40, -3e-42])]),
        "squares too large": torch.randn(500) * 1e30,
        "squares too small": torch.randn(500) * 1e-30,
        "not finite": torch.tensor([math.inf, -math.inf, math.nan, 3e38, 1e-45, 0.0]),
        "all alike": torch.full((3000,), 0.3),
        "half": torch.randn(3000).half(),
        "half, every code": torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16),
        "bfloat16, every code": torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16),
    }


@pytest.fixture(scope="session")
def cases():
    return hard_cases()
