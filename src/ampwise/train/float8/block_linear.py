"""A linear layer as three FP8 matmuls with a scale for each block: ``Fp8("block")``.

Inputs and gradients are scaled in blocks of 1×128, along what each matmul contracts over; weights in tiles of 128×128.
All are in E4M3: a block needs less range than a tensor. For the backward pass it saves the transposed copy of the input
and its scales, half of what BF16 saves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.train.float8.block_cast import cast_to_strips, cast_to_tiles
from ampwise.train.float8.block_matmul import block_matmul
from ampwise.train.float8.fp8_linear import linear_of_empty_batch, out_dtype, refuse_second_derivative

__all__ = ["block_linear"]


def block_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, blas: bool) -> Tensor:
    """Compute ``F.linear`` with FP8 matmuls whose operands have a scale for each block.

    blas: whether cuBLAS has such matmuls on this device.
    """
    dtype = out_dtype(x)
    if not x.numel():
        return linear_of_empty_batch(x, weight, bias)
    matrix = x.to(dtype).reshape(-1, x.shape[-1])
    apply: Any = _BlockLinear.apply
    out: Tensor = apply(matrix, weight, bias, dtype, torch.is_grad_enabled(), blas)
    return out.reshape(*x.shape[:-1], weight.shape[0])


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, keeps: bool, blas: bool
    ) -> Tensor:
        by_x, by_weight = (keeps and needed for needed in ctx.needs_input_grad[:2])
        x8 = cast_to_strips(x, rows=True, columns=by_weight)
        weight8 = cast_to_tiles(weight, rows=True, columns=by_x)
        ctx.save_for_backward(x8.columns, x8.of_columns, weight8.columns, weight8.of_columns)
        ctx.x_dtype, ctx.weight_dtype, ctx.blas = x.dtype, weight.dtype, blas
        ctx.bias_dtype = None if bias is None else bias.dtype
        return block_matmul(x8.rows, weight8.rows, x8.of_rows, weight8.of_rows, dtype, tiles=True, blas=blas, bias=bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, of_x, weight, of_weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad[:3]
        g = cast_to_strips(gradient, rows=by_x, columns=by_weight, sums=by_bias)
        grad_x = grad_weight = None
        if by_x:
            grad_x = block_matmul(g.rows, weight, g.of_rows, of_weight, ctx.x_dtype, tiles=True, blas=ctx.blas)
        if by_weight:
            grad_weight = block_matmul(g.columns, x, g.of_columns, of_x, ctx.weight_dtype, tiles=False, blas=ctx.blas)
        return grad_x, grad_weight, g.sums.to(ctx.bias_dtype) if by_bias else None, None, None, None
