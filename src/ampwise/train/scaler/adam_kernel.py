"""Adam and AdamW in one launch for all parameters of a group, with unscaling, clipping and skipping.

torch's fused kernels reach three quarters of the bandwidth of a copy, in several launches. This one reads parameters
through a table of addresses, as the census does. It computes torch's Adam. ``verdict`` is a step decision on the
device: what gradients are divided by, and whether the step is skipped.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803, SIM108

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BLOCK", "WARPS", "adam_kernel"]

BLOCK = 1024
WARPS = 4

_FOUND_INF = tl.constexpr(1)  # index in a step decision
_GRAD_SCALE = tl.constexpr(3)


@triton.jit
def _load(pointer, offsets, n, MASKED: tl.constexpr):
    if MASKED:
        values = tl.load(pointer + offsets, mask=offsets < n, other=0.0)
    else:
        values = tl.load(pointer + offsets)
    return values


@triton.jit
def _store(pointer, offsets, n, values, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, values, mask=offsets < n)
    else:
        tl.store(pointer + offsets, values)


@triton.jit
def _update_block(
    param, grad, exp_avg, exp_avg_sq, offsets, n, factor, step_size, root_correction,
    lr, weight_decay, rate1, rate2, eps,
    DECOUPLED: tl.constexpr, DECAY: tl.constexpr, MAXIMIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    weight = _load(param, offsets, n, MASKED)
    mean = _load(exp_avg, offsets, n, MASKED)
    square = _load(exp_avg_sq, offsets, n, MASKED)
    gradient = _load(grad, offsets, n, MASKED) * factor
    _store(grad, offsets, n, gradient, MASKED)  # unscaled, as torch leaves them
    if MAXIMIZE:
        gradient = -gradient
    if DECAY:
        if DECOUPLED:
            weight -= (lr * weight_decay) * weight
        else:
            gradient += weight_decay * weight
    mean += rate1 * (gradient - mean)
    square += rate2 * (gradient * gradient - square)
    weight -= step_size * tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root_correction) + eps)
    _store(param, offsets, n, weight, MASKED)
    _store(exp_avg, offsets, n, mean, MASKED)
    _store(exp_avg_sq, offsets, n, square, MASKED)


@triton.jit
def _floats(table, owner, start):
    address = tl.load(table + owner).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address + start, 16)  # the host has checked this


@triton.jit
def adam_kernel(
    weights, grads, exp_avgs, exp_avg_sqs, steps, done, sizes, first_chunks, owners, verdict,
    lr, weight_decay, rate1, rate2, log_beta1, log_beta2, eps,
    LR_ON_DEVICE: tl.constexpr, DECOUPLED: tl.constexpr, DECAY: tl.constexpr, MAXIMIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of one parameter. ``rate1`` is 1 - beta1, from FP64: FP32's 0.999 would lose three digits."""
    if tl.load(verdict + _FOUND_INF) == 0.0:
        chunk = tl.program_id(0)
        owner = tl.load(owners + chunk)
        start = (chunk - tl.load(first_chunks + owner)).to(tl.int64) * CHUNK
        n = tl.minimum(tl.load(sizes + owner) - start, CHUNK).to(tl.int32)
        param, grad = _floats(weights, owner, start), _floats(grads, owner, start)
        exp_avg, exp_avg_sq = _floats(exp_avgs, owner, start), _floats(exp_avg_sqs, owner, start)
        factor = (1.0 / tl.load(verdict + _GRAD_SCALE).to(tl.float64)).to(tl.float32)
        counter = tl.load(steps + owner).to(tl.pointer_type(tl.float32))
        step = tl.load(counter).to(tl.float64) + 1.0
        if LR_ON_DEVICE:
            learning_rate = tl.load(lr).to(tl.float32)
        else:
            learning_rate = lr
        step_size = (learning_rate / (1.0 - tl.exp(step * log_beta1))).to(tl.float32)
        root_correction = tl.sqrt(1.0 - tl.exp(step * log_beta2)).to(tl.float32)
        offsets = tl.arange(0, BLOCK)
        full = n // BLOCK * BLOCK
        for first in range(0, full, BLOCK):
            _update_block(
                param, grad, exp_avg, exp_avg_sq, first + offsets, n, factor, step_size, root_correction,
                learning_rate, weight_decay, rate1, rate2, eps, DECOUPLED, DECAY, MAXIMIZE, False,
            )  # fmt: skip
        if full < n:
            _update_block(
                param, grad, exp_avg, exp_avg_sq, full + offsets, n, factor, step_size, root_correction,
                learning_rate, weight_decay, rate1, rate2, eps, DECOUPLED, DECAY, MAXIMIZE, True,
            )  # fmt: skip
        # Every chunk reads the step count, so the last chunk to finish increments it: all others have read it by then.
        tl.debug_barrier()
        if (tl.atomic_add(done + owner, 1) + 1).to(tl.int64) * CHUNK >= tl.load(sizes + owner):
            tl.store(counter, step.to(tl.float32))
            tl.store(done + owner, 0)
