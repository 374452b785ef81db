"""Counting on a real GPU: the compiled kernel, with and without its PTX, against the reference."""

import math

import pytest
import torch

from ampwise import census

from .conftest import hard_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

CASES = hard_cases()


def test_the_compiled_kernel_counts_what_the_reference_counts():
    counted = census({name: tensor.cuda() for name, tensor in CASES.items()})
    for name, tensor in CASES.items():
        expected = census(tensor)
        assert counted[name] == expected, name
        assert counted[name].sum_squares == pytest.approx(expected.sum_squares, rel=2e-6, abs=0), name


@pytest.mark.parametrize("ptx", [True, False], ids=["ptx", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_equal_to_the_last_count(ptx, dtype):
    from ampwise.numbers.census.count_row import SINGLE, count_in_torch
    from ampwise.numbers.census.launch import TensorBatch, count_into_, new_buffer

    torch.manual_seed(0)
    tensors = [(torch.randn(n, device="cuda") * 10.0**-i).to(dtype) for i, n in enumerate([7, 65536, 1_000_003])]
    batch = TensorBatch(tensors)
    batch.has_ptx = ptx
    buffer = new_buffer(batch)
    count_into_(buffer, batch)
    rows = buffer[: 3 * SINGLE.columns].view(3, -1)
    for row, tensor in zip(rows, tensors, strict=True):
        assert torch.equal(row, count_in_torch(tensor.float())[0])


@pytest.mark.parametrize("scale", [65536.0, 1000.0, 2.0**120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [False, True], ids=["read", "unscaled in memory"])
def test_gradients_of_a_scaled_loss_are_counted_in_true_units(scale, dtype, write):
    from ampwise.numbers.census.launch import launch_census

    factor = torch.tensor(scale).double().reciprocal().float()
    cases = {name: values.reshape(-1).to(dtype) for name, values in CASES.items()}
    on_device = [values.cuda() for values in cases.values()]
    on_device.append(torch.randn(2001, device="cuda").to(dtype)[1:])  # not aligned
    cases["unaligned"] = on_device[-1].cpu()
    counted = launch_census(on_device, torch.tensor(scale, device="cuda"), write=write).fetch()
    for (name, values), memory, found in zip(cases.items(), on_device, counted, strict=True):
        true = values.float() * factor
        assert found == census(true.to(dtype) if write else true), name
        expected = true.to(dtype) if write else values
        assert torch.equal(memory.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), name


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
def test_dtypes_without_a_kernel_of_their_own(dtype):
    values = (torch.randn(1000) * 3).to(dtype)
    assert census(values.cuda()) == census(values)


def test_views_and_misaligned_tensors():
    base = torch.randn(64, 65, device="cuda")
    for view in (base.t(), base[1:, 3:], base[:, ::2], base.view(-1)[1:], base[0, 0].expand(9)):
        assert census(view) == census(view.cpu())


def test_measuring_does_not_wait_and_results_are_fetched_in_one_copy():
    tensors = {str(i): torch.randn(1000, device="cuda") for i in range(20)}
    census(tensors).fetch()  # compiled, and the plan is cached
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        counted = census(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert counted.total().count == 20_000
    copies = [event for event in profile.events() if "DtoH" in event.name]
    assert len(copies) == 1


def test_a_result_may_be_fetched_on_another_stream():
    tensor = torch.zeros(1000, device="cuda")
    census({"x": tensor}).fetch()  # compiled before, so that launching takes no time
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(3.0)
        counted = census({"x": tensor})
    assert counted["x"].amax == 3.0


def test_freed_memory_is_refused():
    from ampwise.errors import UnsupportedTensor

    tensor = torch.ones(10, device="cuda")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensor, match="no memory"):
        census(tensor)


def test_many_tensors_are_one_launch():
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    tensors = {str(i): torch.randn(1000 + i, device="cuda").to(dtypes[i % 3]) for i in range(50)}
    census(tensors).fetch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        census(tensors).fetch()
    launches = [event for event in profile.events() if "census_kernel" in event.name]
    assert len(launches) == 1


def test_the_sum_is_the_same_in_every_run():
    tensors = {"x": torch.randn(3_000_000, device="cuda")}
    sums = {census(tensors)["x"].sum_squares for _ in range(5)}
    assert len(sums) == 1


def test_gradients_with_a_nan_somewhere():
    tensors = {"good": torch.randn(200_000, device="cuda"), "bad": torch.randn(200_000, device="cuda")}
    tensors["bad"][150_001] = math.nan
    tensors["bad"][3] = -math.inf
    counted = census(tensors)
    assert counted["good"].finite
    assert (counted["bad"].nans, counted["bad"].infs, counted["bad"].count) == (1, 1, 200_000)


def test_results_survive_reuse_of_the_gradients_memory():
    tensor = torch.full((1_000_000,), 2.0, device="cuda")
    counted = census({"x": tensor})
    del tensor
    torch.full((1_000_000,), 64.0, device="cuda")
    assert counted["x"].amax == 2.0
