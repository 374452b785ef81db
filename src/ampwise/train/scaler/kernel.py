"""The end of a step on a GPU: census and step decision in one launch, the next scale in another.

As torch operations the scalar arithmetic would be a dozen launches on a few numbers, which on a small model cost more
than reading the gradients once saves. ``grad_stats.py`` and ``loss_scale.py`` define what these kernels must compute.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampwise.numbers.census.count_row import INFS, NANS
from ampwise.numbers.census.kernel import WARPS as CENSUS_WARPS
from ampwise.numbers.census.kernel import count_program
from ampwise.numbers.census.launch import COLUMNS, PendingCensus, TensorBatch, census_arguments, launch, new_buffer
from ampwise.train.scaler.grad_stats import CLIP_EPSILON, WITH_LOSS, StepDecision, in_fp32
from ampwise.train.scaler.loss_scale import MAX_FORGIVEN, ScaleLimits, UpdateField
from ampwise.train.scaler.step_result import buffer_for_kernel

__all__ = ["launch_check", "launch_decision", "launch_totals", "launch_update_scale_"]

BLOCK = 1024  # sums at a time: a model of a billion parameters has 40,000
WARPS = 8

_INFS = tl.constexpr(INFS)
_NANS = tl.constexpr(NANS)
_MARGIN = tl.constexpr(CLIP_EPSILON)
_OUTCOMES = tl.constexpr(int(UpdateField.FIRST_OPTIMIZER))
_FORGIVEN = tl.constexpr(MAX_FORGIVEN)


@triton.jit
def _add_up(
    table, sums, owners, weights, tensors, chunks, ROW: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up the totals, always in the same order. Other programs may just have written them: read from L2."""
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(0, chunks, BLOCK):
        inside = start + lanes < chunks
        part = tl.load(sums + start + lanes, mask=inside, other=0.0, cache_modifier=".cg")
        if WEIGHTED:
            part *= tl.load(weights + tl.load(owners + start + lanes, mask=inside, other=0))
        squares += part
    infinities = tl.zeros([BLOCK], tl.int64)
    nans = tl.zeros([BLOCK], tl.int64)
    for start in range(0, tensors, BLOCK):
        rows = table + (start + lanes).to(tl.int64) * ROW
        inside = start + lanes < tensors
        infinities += tl.load(rows + _INFS, mask=inside, other=0, cache_modifier=".cg")
        nans += tl.load(rows + _NANS, mask=inside, other=0, cache_modifier=".cg")
    return tl.sum(squares), tl.sum(infinities), tl.sum(nans)


@triton.jit
def totals_kernel(
    table, sums, owners, weights, totals, cells, tensors, chunks,
    ROW: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the totals that are summed over ranks."""
    squares, infinities, nans = _add_up(table, sums + cells, owners, weights, tensors, chunks, ROW, WEIGHTED, BLOCK)
    tl.store(totals, squares)
    tl.store(totals + 1, infinities.to(tl.float64))
    tl.store(totals + 2, nans.to(tl.float64))


@triton.jit
def _decide(squares, infinities, nans, spoiled, scale, max_norm, SCALED: tl.constexpr):
    """Return the numbers of a StepDecision. spoiled: more than zero to skip the step whatever the gradients are."""
    norm = tl.sqrt(squares)
    one = tl.full((), 1.0, tl.float64)
    # Without clipping, the quotient of two infinities would be NaN.
    divisor = tl.where(max_norm == float("inf"), one, tl.maximum((norm + _MARGIN) / max_norm, one))
    plain = one
    if SCALED:
        plain = tl.load(scale).to(tl.float64)
    grad_scale = (plain * divisor).to(tl.float32)
    bad = (infinities + nans + spoiled > 0) | (grad_scale == float("inf")) | (grad_scale != grad_scale)
    shown = tl.where(nans > 0, float("nan"), tl.where(infinities > 0, float("inf"), norm)).to(tl.float32)
    divisor = tl.where(bad, one, divisor).to(tl.float32)
    grad_scale = tl.where(bad, plain.to(tl.float32), grad_scale)
    return shown, tl.where(bad, 1.0, 0.0), divisor, grad_scale, tl.where(bad, 0.0, 1.0)


@triton.jit
def _store_decision(place, norm, found_inf, divisor, grad_scale, applied):
    tl.store(place, norm)
    tl.store(place + 1, found_inf)
    tl.store(place + 2, divisor)
    tl.store(place + 3, grad_scale)
    tl.store(place + 4, applied)


@triton.jit
def check_kernel(
    addresses, sizes, kinds, first_chunks, owners, table, sums, scale,
    cells, tensors, chunks, max_norm, loss, numbers, host,
    ROW: tl.constexpr, HAS_FP32: tl.constexpr, HAS_BF16: tl.constexpr, HAS_FP16: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, SLOW_BLOCK: tl.constexpr,
    SCALED: tl.constexpr, WRITE: tl.constexpr, PTX: tl.constexpr,
    HAS_LOSS: tl.constexpr, SKIP_BAD_LOSS: tl.constexpr, TO_HOST: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Count gradients that no other rank has a part of; the last program to finish makes the decision.

    It writes the decision to ``numbers``, and with TO_HOST also to ``host``, pinned memory. With SKIP_BAD_LOSS a loss
    that is not finite skips the step.
    """
    count_program(
        addresses, sizes, kinds, first_chunks, owners, table, sums + cells, scale,
        ROW, HAS_FP32, HAS_BF16, HAS_FP16, CHUNK, BLOCK, SLOW_BLOCK, SCALED, WRITE, PTX,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have written their counts before this program counts as finished
    if tl.atomic_add(table + cells + chunks, 1) == chunks - 1:
        squares, infinities, nans = _add_up(table, sums + cells, owners, sums, tensors, chunks, ROW, False, SUMS)
        spoiled = nans * 0
        if SKIP_BAD_LOSS:
            spoiled += tl.where(tl.abs(tl.load(loss)) < float("inf"), 0, 1)
        norm, found_inf, divisor, grad_scale, applied = _decide(
            squares, infinities, nans, spoiled, scale, max_norm, SCALED
        )
        _store_decision(numbers, norm, found_inf, divisor, grad_scale, applied)
        if TO_HOST:
            _store_decision(host, norm, found_inf, divisor, grad_scale, applied)
        if HAS_LOSS:
            value = tl.load(loss)
            tl.store(numbers + 5, value)
            if TO_HOST:
                tl.store(host + 5, value)


@triton.jit
def decide_kernel(totals, scale, numbers, max_norm, SCALED: tl.constexpr):
    """Compute the decision from totals that are summed over ranks."""
    norm, found_inf, divisor, grad_scale, applied = _decide(
        tl.load(totals), tl.load(totals + 1), tl.load(totals + 2), 0, scale, max_norm, SCALED
    )
    _store_decision(numbers, norm, found_inf, divisor, grad_scale, applied)


@triton.jit
def advance_kernel(
    scale, tracker, tally, outcomes, limits, facts, loss, optimizers, stepped, interval, hysteresis,
    MOVE: tl.constexpr, HAS_LOSS: tl.constexpr, FORGIVES: tl.constexpr,
):  # fmt: skip
    """Update the scale after a step. ``limits``: growth, backoff, floor, ceiling in FP64."""
    overflows = 0
    skipped = 0
    for optimizer in range(optimizers):
        norm = tl.load(outcomes + 2 * optimizer)
        found = tl.load(outcomes + 2 * optimizer + 1)
        overflows += (found > 0).to(tl.int32)
        skipped += ((found > 0) & (optimizer < stepped)).to(tl.int32)
        tl.store(facts + _OUTCOMES + 2 * optimizer, norm.to(tl.float64))
        tl.store(facts + _OUTCOMES + 2 * optimizer + 1, found.to(tl.float64))
    overflowed = overflows > 0
    current = tl.load(scale)
    calm = tl.load(tracker)
    tl.store(facts + 6, current.to(tl.float64))
    tl.store(facts + 7, calm.to(tl.float64))
    in_a_row = tl.load(tally)
    stuck = in_a_row * 0
    forgiven = overflows < 0
    bad_losses = tl.load(tally + 3)
    if HAS_LOSS:
        value = tl.load(loss).to(tl.float64)
        tl.store(facts + _OUTCOMES + 2 * optimizers, value)
    if FORGIVES:
        loss_is_bad = overflowed & (value - value != 0)
        bad_losses += loss_is_bad.to(tl.int64)
        forgiven = loss_is_bad & (bad_losses <= _FORGIVEN)
    tl.store(tally + 3, tl.where(overflowed, bad_losses, 0))
    if MOVE:
        floor = tl.load(limits + 2)
        before, calm_before = current, calm
        row_before = in_a_row
        in_a_row = tl.where(overflowed, in_a_row + 1, 0)
        lowered = overflowed & (in_a_row >= hysteresis)
        stuck = (lowered & (current <= floor)).to(tl.int64)
        wide = current.to(tl.float64)
        less = tl.minimum(current, tl.maximum(wide * tl.load(limits + 1), floor).to(tl.float32))
        calm = tl.where(overflowed, 0, calm + 1)
        grown = calm == interval
        more = (wide * tl.load(limits)).to(tl.float32)
        capped = tl.maximum(current, tl.minimum(more.to(tl.float64), tl.load(limits + 3)).to(tl.float32))
        more = tl.where(more < float("inf"), capped, current)
        current = tl.where(lowered, less, tl.where(grown, more, current))
        calm = tl.where(grown, 0, calm)
        current = tl.where(forgiven, before, current)
        calm = tl.where(forgiven, calm_before, calm)
        in_a_row = tl.where(forgiven, row_before, in_a_row)
        stuck = tl.where(forgiven, 0, stuck)
        tl.store(scale, current)
        tl.store(tracker, calm)
        tl.store(tally, in_a_row)
    applied_steps = tl.load(tally + 1) + stepped - skipped
    skipped_steps = tl.load(tally + 2) + skipped
    tl.store(tally + 1, applied_steps)
    tl.store(tally + 2, skipped_steps)
    tl.store(facts, current.to(tl.float64))
    tl.store(facts + 1, calm.to(tl.float64))
    tl.store(facts + 2, in_a_row.to(tl.float64))
    tl.store(facts + 3, applied_steps.to(tl.float64))
    tl.store(facts + 4, skipped_steps.to(tl.float64))
    tl.store(facts + 5, stuck.to(tl.float64))


def launch_totals(counted: PendingCensus, weights: tuple[float, ...] | None) -> Tensor:
    """Return the totals of a count, with each tensor's sum of squares times its weight."""
    buffer, plan = counted.buffer, counted.batch.plan
    totals = torch.empty(3, dtype=torch.float64, device=buffer.device)
    on_device = None if weights is None else _on_device(weights, buffer.device)
    launch(
        totals_kernel, 1, buffer.device,
        buffer, buffer.view(torch.float64), plan.owners, totals if on_device is None else on_device, totals,
        plan.cells, len(plan.chunks), plan.programs,
        ROW=COLUMNS, WEIGHTED=on_device is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return totals


def launch_check(
    tensors: Sequence[Tensor],
    scale: Tensor | None,
    max_norm: float,
    loss: Tensor | None = None,
    *,
    write: bool = False,
    skip_bad_loss: bool = False,
    to_host: bool = False,
) -> tuple[PendingCensus, StepDecision]:
    """Count gradients and decide on their step in one launch.

    The loss is the decision's last number if it is FP32 on this device; with ``skip_bad_loss``, one that is not finite
    skips the step. With ``to_host`` the kernel writes the decision to pinned memory, too.
    """
    batch = TensorBatch(tensors)
    buffer, device, plan = new_buffer(batch), batch.device, batch.plan
    if loss is not None and (loss.dtype != torch.float32 or loss.device != device):
        loss = None
    if not plan.programs:
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        return PendingCensus(batch, buffer), launch_decision(totals, scale, max_norm)
    numbers = torch.empty(5 if loss is None else WITH_LOSS, dtype=torch.float32, device=device)
    host = buffer_for_kernel(numbers) if to_host and batch.stream is not None else None
    given, constants = census_arguments(buffer, batch, scale, write=write)
    launch(
        check_kernel, plan.programs, device,
        *given, plan.cells, len(plan.chunks), plan.programs, float(max_norm), numbers if loss is None else loss,
        numbers, numbers if host is None else host,
        **constants, HAS_LOSS=loss is not None, SKIP_BAD_LOSS=skip_bad_loss and loss is not None,
        TO_HOST=host is not None, SUMS=BLOCK, num_warps=CENSUS_WARPS,
    )  # fmt: skip
    if write:
        batch.write_back(tensors)
    return PendingCensus(batch, buffer), StepDecision(numbers, host)


def launch_decision(totals: Tensor, scale: Tensor | None, max_norm: float) -> StepDecision:
    """Return the decision for totals."""
    numbers = torch.empty(5, dtype=torch.float32, device=totals.device)
    launch(
        decide_kernel, 1, totals.device,
        totals, numbers if scale is None else scale, numbers, float(max_norm), SCALED=scale is not None, num_warps=1,
    )  # fmt: skip
    return StepDecision(numbers)


def launch_update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    tally: Tensor,
    outcomes: Tensor,
    stepped: int,
    limits: ScaleLimits,
    *,
    move: bool,
    loss: Tensor | None = None,
    forgives: bool = True,
) -> Tensor:
    """Update the scale after a step in one launch; return the facts, in pinned memory unless a graph is captured."""
    count = len(outcomes)
    bounds = (limits.growth, limits.backoff, in_fp32(limits.floor), in_fp32(limits.ceiling))
    length = UpdateField.FIRST_OPTIMIZER + 2 * count + (loss is not None)
    facts = torch.empty(length, dtype=torch.float64, device=scale.device)
    if scale.is_cuda and not torch.cuda.is_current_stream_capturing():
        facts = buffer_for_kernel(facts)
    launch(
        advance_kernel, 1, scale.device,
        scale, growth_tracker, tally, outcomes, _on_device(bounds, scale.device), facts,
        scale if loss is None else loss, count, stepped, limits.interval, limits.hysteresis,
        MOVE=move, HAS_LOSS=loss is not None, FORGIVES=loss is not None and forgives, num_warps=1,
    )  # fmt: skip
    return facts


@lru_cache(maxsize=32)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Upload numbers in FP64, as kernel arguments would be FP32; once, as uploading syncs."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)
