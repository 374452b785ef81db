"""What fits a device, and batches of other sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput, UnknownName
from ampwise.hardware.catalog import gpus
from ampwise.train.precision.precision import PRECISIONS
from ampwise.tune.memory.allocation_log import AllocationLog, Phase
from ampwise.tune.memory.batch_scaling import fit_affine, largest_fitting
from ampwise.tune.memory.device_memory import (
    CONTEXT,
    GIB,
    DeviceMemory,
    catalog_memory,
    catalog_memory_sizes,
    cublas_workspaces,
)
from ampwise.tune.memory.fit_search import largest_batch
from ampwise.tune.memory.peak import Fit, check_fit, find_peak

FP32, BF16 = PRECISIONS["fp32"], PRECISIONS["bf16"]


@pytest.mark.nightly
def test_two_sizes_tell_about_a_third(small):
    for precision in (FP32, BF16):
        line = fit_affine(small.whole(precision, 4), small.whole(precision, 8), batches=(4, 8))
        assert line.at(16) == small.whole(precision, 16)


def test_steps_of_other_operations_tell_nothing():
    log = AllocationLog(sizes=(1, 2), kinds=("x", "x"), events=(0, 1), phases=())
    other = AllocationLog(sizes=(1, 2), kinds=("x", "x"), events=(0, ~0, 1), phases=())
    assert fit_affine(log, other, batches=(1, 2)) is None


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 6000))
def test_the_largest_that_fits_is_found(limit, most, start):
    asked = []
    assert largest_fitting(lambda number: asked.append(number) or number <= limit, most, start) == min(limit, most)
    assert all(1 <= number <= most for number in asked)
    assert len(asked) == len(set(asked)) <= 30


def test_a_room_is_what_is_left_for_torch():
    here = DeviceMemory(name="a GPU", total=80 * GIB, basis="measured here", capability=(8, 0))
    assert here.usable == 80 * GIB - CONTEXT
    assert catalog_memory("a100-sxm-80").usable < here.usable
    with pytest.raises(UnknownName, match=r"unknown device 'a100-sxm-81'. Did you mean a100-sxm-80"):
        catalog_memory("a100-sxm-81")


def test_every_gpu_of_the_catalog_with_memory_is_a_room():
    for gpu in gpus():
        if gpu.figure("memory_bytes") is None:
            with pytest.raises(BadInput, match="has no memory size for it"):
                catalog_memory(gpu)
        else:
            assert 0 < catalog_memory(gpu).usable < catalog_memory(gpu).total
    totals = [room.total for room in catalog_memory_sizes()]
    assert totals == sorted(set(totals))


def test_hopper_has_larger_workspaces():
    assert cublas_workspaces((9, 0)) == cublas_workspaces(None) == 65 * 2**20
    assert cublas_workspaces((8, 0)) < 20 * 2**20


def test_a_fit_is_tight_where_cached_memory_has_to_go_back():
    sizes, phases = (16 * 2**20, 24 * 2**20), (Phase("forward", 0, 4), Phase("update", 4, 4))
    log = AllocationLog(sizes=sizes, kinds=("temporary",) * 2, events=(0, ~0, 1, ~1), phases=phases)
    fits = [check_fit(log, {}, room * 2**20) for room in (23, 24, 39, 40)]
    assert fits == [Fit.NO, Fit.TIGHT, Fit.TIGHT, Fit.YES]


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [1, 3])
def test_the_largest_batch_is_the_one_found_by_trying_all(small, rows):
    room = small.step(BF16, 8).lowest + 2**20
    tried = [size for size in range(6, 11) if small.step(BF16, size).fit(room) is not Fit.NO]
    assert largest_batch(small, BF16, rows, room) == max(tried)
    assert largest_batch(small, BF16, rows, 2**20) == 0


def test_what_fits_by_how_much_room_there_is(small):
    step = small.step(BF16, 16)
    peak = find_peak(step.log, {})
    assert check_fit(step.log, {}, peak.reserved) is Fit.YES
    assert check_fit(step.log, {}, peak.allocated - 2**20) is Fit.NO
    assert check_fit(step.log, {"x": 2**20}, peak.reserved) is not Fit.YES
    rooms = [check_fit(step.log, {}, room) for room in range(0, 2 * peak.reserved, peak.reserved // 20)]
    assert rooms == sorted(rooms, key=[Fit.NO, Fit.TIGHT, Fit.YES].index)  # more room is never worse
