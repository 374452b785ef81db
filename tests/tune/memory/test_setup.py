"""What fits a device, batches of other sizes, and what each of several ranks holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput, UnknownName
from ampwise.hardware.catalog import gpus
from ampwise.train.precision.precision import PRECISIONS
from ampwise.tune.memory.allocation_log import (
    ACTIVATIONS,
    CASTS,
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    REDUCED,
    STATE,
    AllocationLog,
    Phase,
)
from ampwise.tune.memory.allocator import Fit, RankStep
from ampwise.tune.memory.device_memory import (
    CONTEXT,
    GIB,
    DeviceMemory,
    catalog_memory,
    catalog_memory_sizes,
    cublas_workspaces,
)
from ampwise.tune.memory.setup import extrapolate, fsdp_share, largest_fitting

FP32, BF16 = PRECISIONS["fp32"], PRECISIONS["bf16"]


@pytest.mark.nightly
def test_two_sizes_tell_about_a_third(small):
    for precision in (FP32, BF16):
        four, eight, sixteen = (small.run(precision, batch)[0] for batch in (4, 8, 16))
        assert extrapolate(four, eight, batches=(4, 8))(16) == sixteen


def test_steps_of_other_operations_tell_nothing():
    log = AllocationLog(sizes=(1, 2), kinds=("x", "x"), events=(0, 1), phases=())
    other = AllocationLog(sizes=(1, 2), kinds=("x", "x"), events=(0, ~0, 1), phases=())
    assert extrapolate(log, other, batches=(1, 2)) is None


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
    totals = [size.total for size in catalog_memory_sizes()]
    assert totals == sorted(set(totals))


def test_hopper_has_larger_workspaces():
    assert cublas_workspaces((9, 0)) == cublas_workspaces(None) == 65 * 2**20
    assert cublas_workspaces((8, 0)) < 20 * 2**20


def test_a_fit_is_tight_where_cached_memory_has_to_go_back():
    sizes, phases = (16 * 2**20, 24 * 2**20), (Phase("forward", 0, 4), Phase("update", 4, 4))
    log = AllocationLog(sizes=sizes, kinds=("temporary",) * 2, events=(0, ~0, 1, ~1), phases=phases)
    fits = [RankStep(log=log, extra={}).fit(size * 2**20) for size in (23, 24, 39, 40)]
    assert fits == [Fit.NO, Fit.TIGHT, Fit.TIGHT, Fit.YES]


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [1, 3])
def test_the_largest_batch_is_the_one_found_by_trying_all(small, rows):
    budget = small.step(BF16, 8).lowest + 2**20
    tried = [size for size in range(6, 11) if small.step(BF16, size).fit(budget) is not Fit.NO]
    assert small.largest_batch(BF16, rows, budget) == max(tried)
    assert small.largest_batch(BF16, rows, 2**20) == 0


def test_what_fits_by_how_much_room_there_is(small):
    step = small.step(BF16, 16)
    usage = step.usage
    assert step.fit(usage.reserved) is Fit.YES
    assert step.fit(usage.peak - 2**20) is Fit.NO
    assert RankStep(log=step.log, extra={"x": 2**20}).fit(usage.reserved) is not Fit.YES
    fits = [step.fit(size) for size in range(0, 2 * usage.reserved, usage.reserved // 20)]
    assert fits == sorted(fits, key=[Fit.NO, Fit.TIGHT, Fit.YES].index)  # more memory is never worse


@given(st.integers(2, 64), st.integers(0, 4096))
def test_fsdp_divides_what_is_kept(ranks, reduced):
    log = AllocationLog(
        sizes=(640, 640, 640, 640, 640),
        kinds=(PARAMETERS, STATE, ACTIVATIONS, CASTS, GRADIENTS),
        events=(0, 1, 2, 3, ~3, 4, ~2),
        phases=(Phase("forward", 2, 4), Phase("backward", 4, 7), Phase("update", 7, 7)),
    )
    shared = fsdp_share(log, ranks, reduced)
    part = -(-640 // ranks)
    assert shared.sizes == (part, part, 640, 0, part, reduced)  # gathered in 16 bits, weights need no cast
    # From the first gradient to the end of the backward pass, gradients are reduced.
    assert shared.events == (0, 1, 2, 3, ~3, 5, 4, ~2, ~5)
    assert [(phase.start, phase.end) for phase in shared.phases] == [(2, 4), (4, 9), (9, 9)]


def test_fsdp_gathers_blocks_and_one_rank_nothing(small, case_of):
    facts = small.run(BF16, 4)[1]
    shared = small.step(BF16, 4, fsdp=8)
    assert shared.extra == small.step(BF16, 4).extra | {GATHERED: 2 * (facts.outside + facts.block)}
    assert shared.log.most()[REDUCED] == pytest.approx(2 * 3 * facts.block, abs=512)
    assert small.step(BF16, 4, fsdp=1) == small.step(BF16, 4)
    with pytest.raises(BadInput, match="--fsdp 0: expected at least 1 rank"):
        case_of(fsdp=0)


def test_fsdp_shards_in_fp32_and_computes_in_16_bits(small):
    plain, wide, narrow = small.step(BF16, 4).usage, *(small.step(each, 4, fsdp=2).usage for each in (FP32, BF16))
    for kind in (PARAMETERS, GRADIENTS, STATE):
        assert narrow.most[kind] == pytest.approx(wide.most[kind], rel=0.01)
    assert narrow.most[ACTIVATIONS] < 1.01 * plain.most[ACTIVATIONS] < wide.most[ACTIVATIONS]


def test_more_ranks_need_less(small):
    peaks = [small.step(BF16, 4, fsdp=ranks).usage.peak for ranks in (2, 4, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)


def test_weights_are_gathered_in_what_is_computed_in(small):
    wide, narrow = (small.step(precision, 4, fsdp=8).usage.most for precision in (FP32, BF16))
    assert wide[GATHERED] == 2 * narrow[GATHERED] > 0
    assert wide[REDUCED] == pytest.approx(2 * narrow[REDUCED], abs=512)


def test_ddp_has_all_gradients_once_more(small, case_of):
    plain, buckets = small.step(FP32, 4).usage, case_of(ddp=True).step(FP32, 4).usage
    assert buckets.peak - plain.peak == plain.most[GRADIENTS]
