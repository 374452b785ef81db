"""What each of several ranks holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput
from ampwise.train.precision.precision import PRECISIONS
from ampwise.tune.memory.allocation_log import ACTIVATIONS, CASTS, GRADIENTS, PARAMETERS, STATE, AllocationLog, Phase
from ampwise.tune.memory.ranks import GATHERED, REDUCED, Fsdp, FsdpUnits

FP32, BF16 = PRECISIONS["fp32"], PRECISIONS["bf16"]


@given(st.integers(2, 64))
def test_fsdp_divides_what_is_kept(ranks):
    log = AllocationLog(
        sizes=(640, 640, 640, 640, 640),
        kinds=(PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, CASTS),
        events=(0, 1, 2, 3, 4),
        phases=(Phase("forward", 0, 5),),
    )
    shared = Fsdp(ranks=ranks).share(log)
    assert shared.sizes == (*[-(-640 // ranks)] * 3, 640, 0)  # gathered in 16 bits, weights need no cast


def test_fsdp_gathers_blocks_and_one_rank_nothing():
    units = FsdpUnits(block=1000, outside=100)
    assert Fsdp(ranks=8).extra(units, 2) == {GATHERED: 2 * 3100, REDUCED: 2 * 3100}
    assert Fsdp(ranks=1).extra(units, 2) == {}
    with pytest.raises(BadInput, match="--fsdp 0: expected at least 1 rank"):
        Fsdp(ranks=0)


def test_more_ranks_need_less_and_one_rank_needs_what_none_does(small):
    peaks = [small.step(BF16, 4, fsdp=Fsdp(ranks=ranks)).peak.allocated for ranks in (2, 4, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)
    assert small.step(BF16, 4, fsdp=Fsdp(ranks=1)).peak == small.step(BF16, 4).peak


def test_weights_are_gathered_in_what_is_computed_in(small):
    wide, narrow = (small.step(precision, 4, fsdp=Fsdp(ranks=8)).extra for precision in (FP32, BF16))
    assert wide[GATHERED] == 2 * narrow[GATHERED] > 0
    assert wide[REDUCED] == 2 * narrow[REDUCED] > 0


def test_ddp_has_all_gradients_once_more(small, case_of):
    plain, buckets = small.step(FP32, 4).peak, case_of(ddp=True).step(FP32, 4).peak
    assert buckets.allocated - plain.allocated == plain.most[GRADIENTS]
