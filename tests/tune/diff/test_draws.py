"""Both sides draw the same random numbers, whatever format they draw them for."""

import pytest
import torch
from torch import nn

from ampwise.tune.diff.module_calls import DiffMode, ModuleCalls
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.shared_random import SharedRandom

from ...for_each import for_each

NARROW = [torch.bfloat16, torch.float16, torch.float64]


def drawn(work):
    draws = SharedRandom()
    torch.manual_seed(0)
    with DiffMode(ModuleCalls(ModuleNames({})), draws):
        result = work()
    return result, draws


DRAWS = {
    "dropout": lambda dtype: nn.functional.dropout(torch.ones(50, 6, dtype=dtype), 0.4),
    "dropout of another layout": lambda dtype: nn.functional.dropout(torch.ones(6, 50, dtype=dtype).T, 0.4),
    "in place": lambda dtype: torch.empty(300, dtype=dtype).uniform_(-1, 1),
    "normal": lambda dtype: torch.empty(300, dtype=dtype).normal_(1, 2),
    "randn": lambda dtype: torch.randn(300, dtype=dtype),
    "rand_like": lambda dtype: torch.rand_like(torch.ones(300, dtype=dtype)),
    "bernoulli": lambda dtype: torch.bernoulli(torch.full((300,), 0.5, dtype=dtype)),
    "default": lambda dtype: _by_default(dtype),
    "native": lambda dtype: torch.native_dropout(torch.ones(300, dtype=dtype), 0.25, True)[0],
}


def _by_default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else torch.float32)
    try:
        return torch.randn(300)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.half_by_day
@pytest.mark.parametrize("what", DRAWS)
@pytest.mark.parametrize("dtype", NARROW)
def test_the_numbers_are_those_of_fp32(what, dtype):
    reference, draws = drawn(lambda: DRAWS[what](torch.float32))
    found, _ = drawn(lambda: DRAWS[what](dtype))
    assert draws.any
    assert found.dtype in (dtype, torch.float32)
    assert torch.allclose(found.double(), reference.double(), atol=0.02)
    if "dropout" in what:
        assert torch.equal(found == 0, reference == 0)


@for_each("work", [lambda: torch.randperm(20), lambda: torch.randint(9, (20,)), lambda: torch.randn(9)])
def test_what_needs_no_cast_is_torchs_own(work):
    torch.manual_seed(0)
    plain = work()
    assert torch.equal(drawn(work)[0], plain)


def test_a_kernel_with_masks_of_its_own_is_noticed():
    query = torch.randn(1, 1, 4, 8)
    _, without = drawn(lambda: nn.functional.scaled_dot_product_attention(query, query, query))
    assert not without.any
    func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    draws = SharedRandom()
    with pytest.raises(RuntimeError):  # the CPU's has none, and says so
        draws(func, (query, query, query, 0.5, False), {})
    assert draws.masked_inside


def test_on_two_devices_the_cpu_draws():
    draws = SharedRandom(torch.device("cpu"))
    given = torch.ones(100, device="meta")
    assert draws._elsewhere(given.device) == torch.device("cpu")
    assert draws._elsewhere(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_dropout_on_two_devices_is_the_same(dtype):
    def dropped(device):
        torch.manual_seed(0)
        with DiffMode(ModuleCalls(ModuleNames({})), SharedRandom(torch.device("cpu"))):
            return nn.functional.dropout(torch.ones(64, 33, device=device, dtype=dtype), 0.3)

    assert torch.equal(dropped("cpu") == 0, dropped("cuda").cpu() == 0)


@pytest.mark.gpu
def test_a_dropout_on_a_gpu_is_that_of_fp32():
    def dropped(dtype):
        torch.manual_seed(0)
        with DiffMode(ModuleCalls(ModuleNames({})), SharedRandom()):
            return nn.functional.dropout(torch.ones(1000, 33, device="cuda", dtype=dtype), 0.3)

    reference = dropped(torch.float32)
    for dtype in NARROW:
        assert torch.equal(dropped(dtype) == 0, reference == 0)
