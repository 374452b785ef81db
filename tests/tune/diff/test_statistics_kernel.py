"""The kernel gives the rows that the reference defines, in Triton's interpreter and on a GPU."""

import itertools
import math

import pytest
import torch

from ampwise.tune.diff import statistics
from ampwise.tune.diff.statistics import Ledger, _row

pytest.importorskip("triton")

from ampwise.tune.diff.statistics_kernel import LEAST, PROGRAMS, READ, launch_row

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WHOLES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
SUMS, LARGEST, AT, REST = slice(0, 3), 3, 4, slice(5, 13)
SCALED = (1 / 1000, 1 / 3)  # which FP32 has not

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled, not interpreted")


def pair_of(dtype_a, dtype_b, size, device="cpu"):
    """Values with all that is special, errors of many sizes; the largest is at one place alone."""
    generator = torch.Generator().manual_seed(size)
    a = 3 * torch.randn(size, generator=generator)
    b = a + torch.randn(size, generator=generator) * torch.logspace(-8, -1, size)
    worst = size * 7 // 8  # which the last program has
    a[worst], b[worst] = 2.0, 90.0
    if size > 100:
        a[:10] = torch.tensor([0.0, 0.0, math.inf, -math.inf, math.nan, math.inf, 1e-41, -0.0, 1e-30, -math.inf])
        b[:10] = torch.tensor([0.0, 1.0, math.inf, math.inf, 1.0, math.nan, 3e-41, 0.0, 2e-30, -math.inf])
    if not dtype_a.is_floating_point:
        a, b = a.nan_to_num(0, 0, 0).abs(), b.nan_to_num(0, 0, 0).abs()
    return a.to(dtype_a).to(device), b.to(dtype_b).to(device)


def in_turn(dtypes):
    return list(itertools.pairwise([*dtypes, dtypes[0]]))


def check(a, b, factors=(1.0, 1.0)):
    found, wanted = launch_row(a, b, factors).cpu(), _row(a.cpu(), b.cpu(), factors)
    torch.testing.assert_close(found[SUMS], wanted[SUMS], rtol=1e-12, atol=0)
    # A GPU multiplies by a factor and subtracts in one operation, which rounds once less.
    scaled_on_gpu = a.is_cuda and factors != (1.0, 1.0)
    within = 1e-15 if scaled_on_gpu else 0.0
    torch.testing.assert_close(found[LARGEST], wanted[LARGEST], rtol=within, atol=0)
    assert found[REST].tolist() == wanted[REST].tolist()
    error = statistics._finite(b.cpu(), factors[1]) - statistics._finite(a.cpu(), factors[0])
    torch.testing.assert_close(error[int(found[AT])].abs(), wanted[LARGEST], rtol=within, atol=0)


def test_it_reads_what_the_tests_try():
    assert set(FLOATS + WHOLES) == READ


@pytest.mark.half_by_day
@interpreted
@pytest.mark.parametrize("dtypes", [*in_turn(FLOATS), (torch.float32, torch.float32)])
def test_a_row_is_the_references(dtypes):
    check(*pair_of(*dtypes, 700), SCALED)


@pytest.mark.half_by_day
@interpreted
@pytest.mark.parametrize("dtypes", in_turn(WHOLES))
def test_a_row_of_whole_numbers_is_the_references(dtypes):
    check(*pair_of(*dtypes, 700))


@interpreted
@pytest.mark.parametrize("size", [1, 512, LEAST + 701])
def test_any_size_will_do(size):
    check(*pair_of(torch.float32, torch.bfloat16, size))


@interpreted
def test_what_is_the_same_has_its_largest_error_at_the_first_place():
    same = torch.randn(LEAST + 5)
    assert launch_row(same, same.clone(), (1.0, 1.0))[2:5].tolist() == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("factors", [(1.0, 1.0), SCALED])
@pytest.mark.parametrize("size", [1, 511, LEAST + 700])
def test_on_a_gpu_a_row_is_the_references(size, factors):
    for dtypes in (*itertools.product(FLOATS, FLOATS), *itertools.product(WHOLES, WHOLES)):
        check(*pair_of(*dtypes, size, "cuda"), factors)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [PROGRAMS * LEAST, PROGRAMS * LEAST + 16, 3 * PROGRAMS * LEAST + 5])
def test_on_a_gpu_a_row_of_many_values_is_the_references(size):
    for dtypes in (*in_turn(FLOATS), (torch.float32, torch.float32), (torch.int64, torch.int64)):
        check(*pair_of(*dtypes, size, "cuda"))


@pytest.mark.gpu
def test_on_a_gpu_what_does_not_begin_at_an_even_address_is_read():
    a, b = pair_of(torch.float32, torch.bfloat16, 9001, "cuda")
    check(a[1:], b[1:])
    check(a[3:], b[2:-1])


@pytest.mark.gpu
def test_on_a_gpu_more_values_than_32_bits_count():
    a = torch.zeros(2**31 + 100, dtype=torch.int8, device="cuda")
    b = a.clone()
    b[-3] = 5
    row = launch_row(a, b, (1.0, 1.0)).tolist()
    assert (row[2], row[3], row[4], row[5], row[9]) == (25, 5, 2**31 + 97, 1, 1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("layout", ["contiguous", "turned", "mixed", "on the host"])
def test_on_a_gpu_any_layout_is_measured_and_nothing_waits(layout):
    a, b = torch.randn(40, 30, 20), torch.randn(40, 30, 20)
    if layout != "contiguous":
        a = a.transpose(0, 2).contiguous().transpose(0, 2)
    if layout == "turned":
        b = b.transpose(0, 2).contiguous().transpose(0, 2)
    wanted = Ledger()
    wanted.add("x", a, b)
    there = a if layout == "on the host" else a.cuda()
    other, ledger = b.cuda().bfloat16().float(), Ledger()
    ledger.add("x", there, other)  # compiled
    ledger = Ledger()
    torch.cuda.set_sync_debug_mode("default" if layout == "on the host" else "error")
    try:
        ledger.add("x", there, other)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted.add("x", a, other.cpu())
    found, expected = ledger.settled()["x"], wanted.settled()["x"]
    assert found.norm_error == pytest.approx(expected.norm_error, rel=1e-12)
    assert (found.largest_at, found.largest_error) == (expected.largest_at, expected.largest_error)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_on_a_gpu_a_pair_takes_two_launches():
    a, b = torch.randn(10**6, device="cuda"), torch.randn(10**6, device="cuda")
    statistics.compare_tensors(a, b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        statistics.compare_tensors(a, b)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in ran if "ynchronize" not in name] == ["compare_kernel", "combine_kernel"]
