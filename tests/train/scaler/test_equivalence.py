"""The scaler against plain torch, bit for bit, and against float64 without a scaler, to the tolerances stated here."""

from dataclasses import replace
from functools import cache, cached_property

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from ampwise import GradScaler

from .equivalence_loops import (
    FAULTS,
    FAULTY,
    MAX_NORM,
    OTHER_SCALE,
    POWER_OF_TWO,
    REFUSED,
    STEPS,
    Arrangement,
    are_equal,
    arrangements,
    by_hand,
    distance,
    faults,
    implementations,
    optimizers,
    scales,
    with_scaler,
)

# A distance is relative to the way the parameters have come in the run: norm(a - b) / norm(b - start).
# clip_ accumulates the norm in FP64 and may round a gradient once where torch rounds it twice.
# What a run of 200 steps showed stands in brackets; a tolerance is a few times that.
pytestmark = pytest.mark.usefixtures("small_operations_are_cheap")

CLIP_TOLERANCES = {
    "Muon": 5e-4,  # [6e-5] orthogonalises in BF16, where a last bit may become 2**-8
    "others": 1e-6,  # [3e-7]
}
# From float64 clip_ may be twice [1.04] as far as torch is: roundings that differ are two draws from one distribution.
TIMES_TORCH, LAST_BIT = 2, 2.0**-24
FLOAT64_TOLERANCES = {
    "Muon": 5e-4,  # [7e-5]
    "ASGD": 5e-4,  # [8e-5] multiplies parameters by 1 - 1e-6, of which FP32 keeps the 1e-6 to 3%
    "others": 3e-5,  # [7e-6]
}
OTHER_SCALE_TOLERANCE = 1e-6  # [2e-7] a scale that is no power of two rounds a gradient twice more
AUTOCAST_TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}  # [4e-4, 3e-3] 11 and 8 bits


def clip_in_torch(scaler, optimizer):
    scaler.unscale_(optimizer)
    clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)


def clip_folded(scaler, optimizer):
    scaler.clip_(optimizer, MAX_NORM)


def clip_nothing(scaler, optimizer):
    scaler.clip_(optimizer, 1e9)


def clip_in_memory(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.clip_(optimizer, MAX_NORM)


def run(kind, arrangement, clip=None, settings=POWER_OF_TWO, **options):
    if clip is None and arrangement.clipped:
        clip = clip_in_torch
    return with_scaler(arrangement, kind(arrangement.device, **settings), clip, **options)


@cache
def in_float64(arrangement):
    return by_hand(arrangement, left_out=faults(arrangement, first=True), dtype=torch.float64)


class Runs:
    """The runs of one arrangement, each made when it is first asked for."""

    def __init__(self, arrangement):
        self.arrangement = arrangement
        self.planted = faults(arrangement, first=True)

    @cached_property
    def ours(self):
        return run(GradScaler, self.arrangement)

    @cached_property
    def with_clip_(self):
        return run(GradScaler, self.arrangement, clip_folded if self.arrangement.clipped else clip_nothing)

    @cached_property
    def truth(self):
        """Plain torch, but where it is wrong: if the first step of its fused SGD is skipped, momentum is memory that
        nobody has written. There, the same optimizer by hand, with the scales of the documented rule.
        """
        if self.arrangement.is_fused_momentum:
            return by_hand(self.arrangement, left_out=self.planted)
        return run(torch.amp.GradScaler, self.arrangement)

    @cached_property
    def float64(self):
        """The for-loop, whichever implementation is looked at: it is written in plain operations."""
        plain = "only" if self.arrangement.implementation == "only" else "for-loop"
        return in_float64(replace(self.arrangement, implementation=plain))

    def tolerance(self, table):
        return table.get(self.arrangement.optimizer, table["others"])


def parameters(keep=lambda arrangement: True):
    """One pytest parameter an arrangement, on each device."""
    return [
        pytest.param(arrangement, id=str(arrangement), marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device in ("cpu", "cuda")
        for arrangement in arrangements(device)
        if keep(arrangement)
    ]


@pytest.fixture(scope="module", params=parameters())
def runs(request):
    return Runs(request.param)


@pytest.fixture
def dense_runs(runs):
    if runs.arrangement.is_sparse and runs.arrangement.clipped:
        pytest.skip("torch cannot clip sparse gradients")
    return runs


@pytest.mark.few_by_day(3)
def test_as_a_drop_in_it_is_torch_bit_for_bit(dense_runs):
    runs = dense_runs
    assert runs.ours.skipped == runs.truth.skipped == set(runs.planted)
    assert runs.ours.scales == runs.truth.scales
    if runs.arrangement.is_fused_momentum and runs.arrangement.device == "cuda":
        # The truth is by hand, and its kernel is not told to divide: its compiler contracts other operations.
        assert distance(runs.ours, runs.truth) < runs.tolerance(CLIP_TOLERANCES)
    else:
        assert are_equal(runs.ours, runs.truth)


@pytest.mark.few_by_day(3)
def test_a_skipped_step_changes_neither_parameters_nor_state(dense_runs):
    assert not dense_runs.ours.spoiled
    assert not dense_runs.with_clip_.spoiled


@pytest.mark.few_by_day(3)
def test_clip_is_torchs_clipping_to_the_tolerance_and_none_at_all_bit_for_bit(dense_runs):
    runs = dense_runs
    assert runs.with_clip_.scales == runs.truth.scales
    assert runs.with_clip_.skipped == set(runs.planted)
    has_kernel_of_ours = runs.arrangement.implementation == "fused" and runs.arrangement.device == "cuda"
    if runs.arrangement.clipped or has_kernel_of_ours:
        assert distance(runs.with_clip_, runs.truth) < runs.tolerance(CLIP_TOLERANCES)
    else:
        assert are_equal(runs.with_clip_, runs.truth)


@pytest.mark.few_by_day(3)
def test_it_ends_as_near_to_float64_as_torch_does(dense_runs):
    runs = dense_runs
    from_torch = distance(runs.truth, runs.float64)
    assert from_torch < runs.tolerance(FLOAT64_TOLERANCES)
    assert distance(runs.with_clip_, runs.float64) < TIMES_TORCH * from_torch + LAST_BIT


@pytest.mark.parametrize("arrangement", parameters(lambda it: it.is_sparse and it.clipped))
def test_sparse_gradients_are_clipped_as_in_float64(arrangement):
    clipped = run(GradScaler, arrangement, clip_folded)
    assert clipped.skipped == set(faults(arrangement, first=True))
    assert not clipped.spoiled
    assert distance(clipped, in_float64(arrangement)) < FLOAT64_TOLERANCES["others"]


@pytest.mark.parametrize("arrangement", parameters(lambda it: it.is_fused_momentum))
def test_fused_momentum_is_torchs_where_torch_does_not_skip_the_first_step(arrangement):
    planted = faults(arrangement, first=False)
    ours, theirs = (run(kind, arrangement, planted=planted) for kind in (GradScaler, torch.amp.GradScaler))
    assert are_equal(ours, theirs)


def few(arrangement):
    """All implementations of two optimizers, one of them with momentum."""
    has_momentum = "momentum" in dict(arrangement.options)
    return arrangement.optimizer == "AdamW" or (has_momentum and arrangement.optimizer == "SGD")


@pytest.mark.parametrize(
    "arrangement", parameters(lambda it: it.optimizer == "AdamW" and it.clipped and it.micro_batches == 1)
)
def test_after_unscale_clip_is_torchs_clipping_too(arrangement):
    runs = Runs(arrangement)
    assert distance(run(GradScaler, arrangement, clip_in_memory), runs.truth) < CLIP_TOLERANCES["others"]


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("arrangement", parameters(lambda it: few(it) and it.micro_batches == 1))
def test_a_scale_that_is_no_power_of_two_costs_a_rounding(arrangement):
    planted = faults(arrangement, first=False)
    ours = run(GradScaler, arrangement, clip_folded if arrangement.clipped else None, OTHER_SCALE, planted=planted)
    assert ours.skipped == set(planted)
    assert ours.scales == list(scales(planted, **OTHER_SCALE))
    assert distance(ours, by_hand(arrangement, left_out=ours.skipped)) < OTHER_SCALE_TOLERANCE


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast", "bf16 weights"])
@pytest.mark.parametrize("arrangement", parameters(lambda it: few(it) and it.clipped and it.micro_batches == 1))
def test_without_scaling_the_guard_leaves_out_the_bad_steps(arrangement, precision):
    dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
    if dtype is torch.bfloat16 and arrangement.implementation == "fused" and arrangement.device == "cpu":
        pytest.skip("torch's fused CPU kernels take no BF16 state")
    arrangement = replace(arrangement, autocast=torch.bfloat16 if precision == "bf16 autocast" else None)
    guarded = run(GradScaler, arrangement, settings={"enabled": False}, dtype=dtype)
    assert guarded.skipped == set(faults(arrangement, first=True))
    assert not guarded.spoiled
    assert are_equal(guarded, by_hand(arrangement, left_out=guarded.skipped, dtype=dtype))


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("dtype", AUTOCAST_TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "arrangement", parameters(lambda it: it.optimizer == "AdamW" and it.clipped and it.micro_batches > 1)
)
def test_under_autocast_it_is_torch_and_skips_what_overflows_by_itself(arrangement, dtype):
    arrangement = replace(arrangement, autocast=dtype)
    settings = {"init_scale": 2.0**24, "growth_interval": 7}  # too large for FP16
    ours, theirs = (
        run(kind, arrangement, settings=settings, planted={}) for kind in (GradScaler, torch.amp.GradScaler)
    )
    assert ours.scales == theirs.scales
    assert ours.skipped == theirs.skipped
    assert len(ours.skipped) > 10 if dtype is torch.float16 else not ours.skipped
    assert are_equal(ours, theirs)
    plain = replace(arrangement, implementation="for-loop", autocast=None)
    float64 = by_hand(plain, left_out=ours.skipped, dtype=torch.float64)
    assert distance(ours, float64) < AUTOCAST_TOLERANCES[dtype]


def test_every_optimizer_of_torch_is_here_or_refused_with_a_reason():
    assert set(optimizers()) == {it.optimizer for it in arrangements("cpu")}
    assert {"SGD", "Adam", "AdamW", "Adagrad"} == {
        i.optimizer for i in arrangements("cpu") if i.implementation == "fused"
    }
    met = {(it.optimizer, it.implementation) for it in arrangements("cpu")}
    assert met == {(name, each) for name in optimizers() for each in implementations(name, "cpu")}
    assert REFUSED.keys() <= vars(torch.optim).keys()


def test_faults_are_of_every_kind_and_the_first_step_among_them():
    planted = [faults(arrangement, first=True) for arrangement in arrangements("cpu")]
    assert all(0 in faulty and len(faulty) == FAULTY for faulty in planted)
    assert {fault for faulty in planted for fault in faulty.values()} == set(FAULTS)
    assert 8 * POWER_OF_TWO["growth_interval"] <= STEPS  # the scale grows and falls several times


def test_the_comparison_can_fail():
    arrangement = Arrangement("SGD", "for-loop", (("lr", 0.05),))
    whole, less = by_hand(arrangement, left_out=()), by_hand(arrangement, left_out={STEPS - 1})
    assert not are_equal(whole, less)
    assert distance(whole, less) > 1e-4
