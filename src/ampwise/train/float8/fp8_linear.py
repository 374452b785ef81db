"""A linear layer as three FP8 matmuls: the output, the input's gradient and the weight's gradient; or some in BF16.

For the backward pass it saves the FP8 copy of the input, transposed as the weight's gradient needs it: half of what
BF16 saves. Formats: E4M3 forward; gradients in E5M2, or E4M3 by recipe. Sums are in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.train.float8.fp8_cast import Fp8Matrix, cast_to_fp8, register_op

__all__ = ["fp8_linear", "linear_of_empty_batch", "out_dtype", "refuse_second_derivative", "scaled_matmul"]

NOT_KEPT = (None,) * 4  # fields of a weight in FP8
NOTHING = (None,) * (7 + len(NOT_KEPT))  # gradients of the scales, settings and of the weight in FP8


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    slot: Tensor | None,
    e5m2: bool,
    forward: bool = True,
    dgrad: bool = True,
    wgrad: bool = True,
    kept: Fp8Matrix | None = None,
) -> Tensor:
    """Compute ``F.linear`` with FP8 matmuls.

    forward, dgrad, wgrad: which of them are in FP8; the others are in 16 bits. All are, with a slot.

    scales: of input, weight and gradient; None to compute them from the tensors' current values.
    slot: a tensor whose gradient receives the statistics of the three, a row each: the largest magnitude, and the
        number of saturated values. torch.compile allows no other output of a backward pass.
    kept: the weight in FP8 by current scaling, in the layouts that the matmuls need; None to cast it here.
    """
    dtype = out_dtype(x)
    if not x.numel():
        return linear_of_empty_batch(x, weight, bias)
    # Like autocast: in a compiled model, the operation that produces x then writes half the bytes.
    matrix = x.to(dtype).reshape(-1, x.shape[-1])
    apply: Any = _Linear.apply
    keeps = torch.is_grad_enabled()
    out: Tensor = apply(
        matrix, weight, bias, slot, scales, e5m2, dtype, keeps, forward, dgrad, wgrad, *(kept or NOT_KEPT)[:4]
    )
    return out.reshape(*x.shape[:-1], weight.shape[0])


def linear_of_empty_batch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the layer for an empty batch, which has nothing to scale; its gradients are zeros, as DDP needs."""
    dtype = out_dtype(x)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def out_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype if it is on, else the tensor's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def refuse_second_derivative() -> None:
    """Raise in a backward pass that is itself differentiated."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise BadInput(
            "backward(create_graph=True) through an FP8 layer: its gradient has no derivative. Keep the layers "
            'that a gradient penalty needs in BF16: Policy("fp8").keep("bf16", name).'
        )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slot: Tensor | None,
        scales: Tensor | None,
        e5m2: bool,
        dtype: torch.dtype,
        keeps: bool,
        forward: bool,
        dgrad: bool,
        wgrad: bool,
        *kept: Any,
    ) -> Tensor:
        by_x, by_weight = (keeps and needed for needed in ctx.needs_input_grad[:2])
        # What a matmul reads: FP8 copies, or in 16 bits the tensors as they are.
        x8 = weight8 = None
        if forward or (wgrad and by_weight):
            x8 = _cast(x, scales, 0, e5m2=False, rows=forward, columns=wgrad and by_weight)
        if kept[0] is not None:
            weight8 = Fp8Matrix(kept[0], kept[1], kept[2], kept[3], weight.new_empty(0))
        elif forward or (dgrad and by_x):
            weight8 = _cast(weight, scales, 1, e5m2=False, rows=forward, columns=dgrad and by_x)
        ctx.save_for_backward(
            x8.columns if x8 is not None and wgrad else x if by_weight else None,
            weight8.columns if weight8 is not None and dgrad else weight if by_x else None,
            None if x8 is None else x8.inverse, None if weight8 is None else weight8.inverse,
            None if x8 is None else x8.seen, None if weight8 is None else weight8.seen, scales,
        )  # fmt: skip
        ctx.e5m2, ctx.x_dtype, ctx.weight_dtype, ctx.dtype = e5m2, x.dtype, weight.dtype, dtype
        ctx.dgrad, ctx.wgrad = dgrad, wgrad
        ctx.bias_dtype = None if bias is None else bias.dtype
        if x8 is None or weight8 is None or not forward:
            return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
        return scaled_matmul(x8.rows, weight8.rows, x8.inverse, weight8.inverse, dtype, bias=bias, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, weight, of_x8, of_weight8, x_seen, weight_seen, scales = ctx.saved_tensors
        by_x, by_weight, by_bias, by_slot = ctx.needs_input_grad[:4]
        of_x = of_weight = of_bias = of_slot = g = None
        rows, columns = by_x and ctx.dgrad, by_weight and ctx.wgrad
        if rows or columns or by_slot:
            g = _cast(gradient, scales, 2, e5m2=ctx.e5m2, rows=rows, columns=columns, sums=by_bias)
        if by_x:
            if g is not None and ctx.dgrad:
                of_x = scaled_matmul(g.rows, weight, g.inverse, of_weight8, ctx.x_dtype)
            else:
                of_x = (gradient.to(ctx.dtype) @ weight.to(ctx.dtype)).to(ctx.x_dtype)
        if by_weight:
            if g is not None and ctx.wgrad:
                of_weight = scaled_matmul(g.columns, x, g.inverse, of_x8, ctx.weight_dtype)
            else:
                of_weight = (gradient.to(ctx.dtype).t() @ x).to(ctx.weight_dtype)
        if by_slot and g is not None:
            of_slot = torch.stack([x_seen, weight_seen, g.seen])
        if by_bias:
            of_bias = gradient.sum(0, dtype=ctx.bias_dtype) if g is None else g.sums.to(ctx.bias_dtype)
        return of_x, of_weight, of_bias, of_slot, *NOTHING


def _cast(
    x: Tensor, scales: Tensor | None, place: int, *, e5m2: bool, rows: bool, columns: bool, sums: bool = False
) -> Fp8Matrix:
    scale = None if scales is None else scales[place]
    return cast_to_fp8(x, scale, e5m2=e5m2, rows=rows, columns=columns, sums=sums)


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    of_a: Tensor,
    of_b: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Return ``a @ b.T`` of FP8 matrices, with their scales undone. fast: sum with fewer bits, as usual in forward.

    of_a, of_b: the inverses of their scales.
    """
    # The kernels can only add a 16-bit bias to a 16-bit result.
    within = bias is not None and dtype in (torch.bfloat16, torch.float16)
    inside = bias.to(dtype) if bias is not None and within else None
    # torch.compile calls the matmul directly, with less host overhead than a custom operator.
    known = torch.compiler.is_compiling() and a.device.type == "cuda"
    out: Tensor = (_multiply if known else multiply_fp8)(a, b, of_a, of_b, inside, dtype, fast)
    return out if bias is None or within else out + bias.to(dtype)


def _multiply(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    if a.device.type == "cuda":
        return torch._scaled_mm(a, b.t(), of_a, of_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):  # the same values, multiplied in FP32
        out = (a.float() @ b.float().t()) * of_a * of_b
        return (out if bias is None else out + bias.float()).to(dtype)


multiply_fp8 = register_op(
    "multiply_fp8(Tensor a, Tensor b, Tensor of_a, Tensor of_b, Tensor? bias, ScalarType dtype, bool fast) -> Tensor",
    _multiply,
    lambda a, b, of_a, of_b, bias, dtype, fast: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
)
