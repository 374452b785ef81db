"""The scalar arithmetic at the end of a step, in one launch each: the step decision, and the next scale.

As torch operations these would be a dozen launches on a few numbers, which on a small model cost more than reading the
gradients once saves. ``grad_stats.py`` and ``loss_scale.py`` define what these kernels must compute.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampwise.numbers.census.count_row import INFS, NANS
from ampwise.numbers.census.launch import COLUMNS, PendingCensus, launch
from ampwise.train.scaler.grad_stats import CLIP_EPSILON, WITH_LOSS, StepDecision, in_fp32
from ampwise.train.scaler.loss_scale import MAX_FORGIVEN, ScaleLimits, UpdateField

__all__ = ["launch_decision", "launch_decision_from_totals", "launch_totals", "launch_update_scale_"]

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
    """Add up the totals, always in the same order."""
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(0, chunks, BLOCK):
        inside = start + lanes < chunks
        part = tl.load(sums + start + lanes, mask=inside, other=0.0)
        if WEIGHTED:
            part *= tl.load(weights + tl.load(owners + start + lanes, mask=inside, other=0))
        squares += part
    infinities = tl.zeros([BLOCK], tl.int64)
    nans = tl.zeros([BLOCK], tl.int64)
    for start in range(0, tensors, BLOCK):
        rows = table + (start + lanes).to(tl.int64) * ROW
        infinities += tl.load(rows + _INFS, mask=start + lanes < tensors, other=0)
        nans += tl.load(rows + _NANS, mask=start + lanes < tensors, other=0)
    return tl.sum(squares), tl.sum(infinities), tl.sum(nans)


@triton.jit
def totals_kernel(
    table, sums, owners, weights, totals, tensors, chunks,
    ROW: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the totals that are summed over ranks."""
    squares, infinities, nans = _add_up(table, sums, owners, weights, tensors, chunks, ROW, WEIGHTED, BLOCK)
    tl.store(totals, squares)
    tl.store(totals + 1, infinities.to(tl.float64))
    tl.store(totals + 2, nans.to(tl.float64))


@triton.jit
def _judge(squares, infinities, nans, scale, verdict, max_norm, loss, SCALED: tl.constexpr, HAS_LOSS: tl.constexpr):
    norm = tl.sqrt(squares)
    one = tl.full((), 1.0, tl.float64)
    # Without clipping, the quotient of two infinities would be NaN.
    divisor = tl.where(max_norm == float("inf"), one, tl.maximum((norm + _MARGIN) / max_norm, one))
    plain = one
    if SCALED:
        plain = tl.load(scale).to(tl.float64)
    grad_scale = (plain * divisor).to(tl.float32)
    bad = (infinities + nans > 0) | (grad_scale == float("inf")) | (grad_scale != grad_scale)
    shown = tl.where(nans > 0, float("nan"), tl.where(infinities > 0, float("inf"), norm))
    tl.store(verdict, shown.to(tl.float32))
    tl.store(verdict + 1, tl.where(bad, 1.0, 0.0))
    tl.store(verdict + 2, tl.where(bad, 1.0, divisor).to(tl.float32))
    tl.store(verdict + 3, tl.where(bad, plain.to(tl.float32), grad_scale))
    tl.store(verdict + 4, tl.where(bad, 0.0, 1.0))
    if HAS_LOSS:
        tl.store(verdict + 5, tl.load(loss))


@triton.jit
def judge_kernel(
    table, sums, scale, verdict, max_norm, loss, tensors, chunks,
    ROW: tl.constexpr, SCALED: tl.constexpr, HAS_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute totals and decision for gradients that no other rank has a part of."""
    squares, infinities, nans = _add_up(table, sums, sums, sums, tensors, chunks, ROW, False, BLOCK)
    _judge(squares, infinities, nans, scale, verdict, max_norm, loss, SCALED, HAS_LOSS)


@triton.jit
def judge_totals_kernel(totals, scale, verdict, max_norm, SCALED: tl.constexpr):
    """Compute the decision from totals that are summed over ranks."""
    _judge(tl.load(totals), tl.load(totals + 1), tl.load(totals + 2), scale, verdict, max_norm, verdict, SCALED, False)


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
    buffer, batch = counted.buffer, counted.batch
    totals = torch.empty(3, dtype=torch.float64, device=buffer.device)
    on_device = None if weights is None else _on_device(weights, buffer.device)
    launch(
        totals_kernel, 1, buffer.device,
        buffer, counted.sums, batch.plan.owners, totals if on_device is None else on_device, totals,
        len(batch.plan.chunks), batch.plan.programs,
        ROW=COLUMNS, WEIGHTED=on_device is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return totals


def launch_decision(
    counted: PendingCensus, scale: Tensor | None, max_norm: float, loss: Tensor | None = None
) -> StepDecision:
    """Return the decision for a count that covers all gradients, with the loss as its last number if it is FP32."""
    buffer, plan = counted.buffer, counted.batch.plan
    if loss is not None and (loss.dtype != torch.float32 or loss.device != buffer.device):
        loss = None
    numbers = torch.empty(5 if loss is None else WITH_LOSS, dtype=torch.float32, device=buffer.device)
    launch(
        judge_kernel, 1, buffer.device,
        buffer, counted.sums, numbers if scale is None else scale, numbers, float(max_norm),
        numbers if loss is None else loss, len(plan.chunks), plan.programs,
        ROW=COLUMNS, SCALED=scale is not None, HAS_LOSS=loss is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return StepDecision(numbers)


def launch_decision_from_totals(totals: Tensor, scale: Tensor | None, max_norm: float) -> StepDecision:
    """Return the decision for totals."""
    numbers = torch.empty(5, dtype=torch.float32, device=totals.device)
    launch(
        judge_totals_kernel, 1, totals.device,
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
    """Update the scale after a step in one launch; return the facts."""
    count = len(outcomes)
    bounds = (limits.growth, limits.backoff, in_fp32(limits.floor), in_fp32(limits.ceiling))
    length = UpdateField.FIRST_OPTIMIZER + 2 * count + (loss is not None)
    facts = torch.empty(length, dtype=torch.float64, device=scale.device)
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
