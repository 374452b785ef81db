"""Recurrent layers as cuDNN runs them: a whole layer stack is one kernel, which keeps a reserve for the backward pass.

The sizes were read off 116 layers on an H200 (torch 2.11, cuDNN 9.19). The reserve is exact; the workspace, which is
freed after each pass, is what most of them took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

RESERVED = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}  # numbers that a layer keeps for each output
SMALL = 256  # bytes, beside them
BITS = 8
PASSES = 6  # workspaces hold so many numbers for each output of the stack
SUMS = 9  # and so many for each state, in each layer
COPIED = 24 * 2**20  # bytes, at most, of weights in FP32
PERSISTENT = {"lstm": 16, "rnn_tanh": 9, "rnn_relu": 9}  # more numbers for each output, with weights held on the chip
PERSISTENT_STEP, PERSISTENT_BATCH, PERSISTENT_WIDEST = 128, 8, 1024


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers of one kind."""

    kind: str
    layers: int
    directions: int
    dropout: float

    def reserve(self, outputs: int, per_number: int, inner: float) -> int:
        """Return the bytes kept. ``outputs``: numbers in the result; ``inner``: numbers before each is projected."""
        between = self.layers - 1
        kept = RESERVED[self.kind] * self.layers * inner + between * inner
        if inner > 1:  # projected outputs, beside those that they are projected from
            kept += self.layers * (1 + inner)
        masks = outputs * self.directions * between // BITS if self.dropout else 0
        return int(kept * outputs) * per_number + masks + SMALL

    def workspace(self, x: Tensor, state: Tensor, outputs: int, weights: Sequence[Tensor], *, flat: bool) -> int:
        """Return the bytes of a pass."""
        per_number, matrices = x.element_size(), sum(each.numel() for each in weights if each.dim() == 2)
        passes = float(PASSES)
        if self.directions > 1:
            passes += 1 + 0.8 * self.layers
        elif self.dropout:
            passes += 1
        sizes = (x.shape[-1], state.shape[-1])
        if (
            self.layers == self.directions == 1
            and per_number == 2
            and flat
            and not any(size % PERSISTENT_STEP for size in sizes)
            and max(sizes) <= PERSISTENT_WIDEST
            and not state.shape[1] % PERSISTENT_BATCH
        ):
            passes += PERSISTENT.get(self.kind, 0)
        sums = (SUMS * self.layers + 2) * state[0].numel()
        return int((passes * outputs + matrices + sums) * per_number) + min(matrices * 4, COPIED)


class CudnnLayers(torch.autograd.Function):
    """Allocates and keeps what cuDNN does; computes nothing."""

    @staticmethod
    def forward(ctx: Any, stack: Stack, batch_first: bool, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, weights = _parted(stack, rest)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        cast = x.to(dtype)
        ctx.stack, ctx.batch_first, ctx.dtype, ctx.x_dtype = stack, batch_first, dtype, x.dtype
        # A copy in one piece; BF16 weights are never in one, as torch flattens FP32 and FP16 only.
        copied = dtype != weights[0].dtype or dtype == torch.bfloat16
        flat = cast.new_empty(sum(each.numel() for each in weights)) if copied else None
        held = tuple(each.to(dtype) for each in states)
        whole = cast.transpose(0, 1).contiguous() if batch_first else cast.contiguous()
        width = held[0].shape[-1] * stack.directions
        out = whole.new_empty((*whole.shape[:-1], width))
        last = tuple(each.new_empty(each.shape) for each in held)
        inner = held[-1].shape[-1] / held[0].shape[-1]
        outputs = int(out.numel() * inner)
        ctx.workspace = stack.workspace(whole, held[-1], outputs, weights, flat=dtype != weights[0].dtype or not copied)
        scratch = _bytes(whole, ctx.workspace)
        reserve = _bytes(whole, stack.reserve(out.numel(), out.element_size(), inner))
        del scratch
        ctx.save_for_backward(cast, out, reserve, *(each for each in (flat,) if each is not None), *rest)
        if batch_first:
            out = out.transpose(0, 1)
        return (out, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cast, *others = ctx.saved_tensors
        rest = others[-(len(ctx.needs_input_grad) - 3) :]
        states, weights = _parted(ctx.stack, rest)
        whole = cast.transpose(0, 1).contiguous() if ctx.batch_first else cast.contiguous()
        arriving = gradients[0].transpose(0, 1) if ctx.batch_first else gradients[0]
        arriving = arriving.contiguous()
        of_x = torch.empty_like(whole)
        of_states = tuple(each.new_empty(each.shape, dtype=ctx.dtype) for each in states)
        scratch = _bytes(whole, ctx.workspace)
        del scratch
        flat = whole.new_empty(sum(each.numel() for each in weights))
        scratch = _bytes(whole, ctx.workspace)
        del scratch, whole, arriving
        if ctx.batch_first:
            of_x = of_x.transpose(0, 1)
        if ctx.dtype != weights[0].dtype:
            of_weights = tuple(torch.empty_like(each) for each in weights)
        else:
            parts = flat.split([each.numel() for each in weights])
            of_weights = tuple(part.view_as(each) for part, each in zip(parts, weights, strict=True))
        given = (each.to(state.dtype) for each, state in zip(of_states, states, strict=True))
        return None, None, of_x.to(ctx.x_dtype), *given, *of_weights


def _parted(stack: Stack, rest: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    count = 2 if stack.kind == "lstm" else 1
    return rest[:count], rest[count:]


def _bytes(like: Tensor, size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.uint8)


def _layers(
    kind: str,
    x: Tensor,
    states: Any,
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    stack = Stack(kind, layers, 2 if bidirectional else 1, dropout if train else 0.0)
    held = states if kind == "lstm" else [states]
    found: tuple[Tensor, ...] = CudnnLayers.apply(stack, batch_first, x, *held, *weights)  # type: ignore[no-untyped-call]
    return found


def cudnn_kernels() -> dict[str, Callable[..., Any]]:
    """Return, by operator, what to run in its place."""
    kinds = RESERVED if torch.backends.cudnn.enabled else ()
    return {f"{kind}.input": partial(_layers, kind) for kind in kinds}
