"""Temporary memory that CUDA's kernels allocate while they run, where it matters.

The sizes follow torch's sources. cuDNN chooses its workspaces for convolutions at run time; they are not included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampwise.tune.memory.row_sum import row_sum_buffer
from ampwise.tune.memory.tracker import Scratch

__all__ = ["SCRATCH"]

ATEN = torch.ops.aten
FLOAT = 4  # bytes
INDEX = 8
WARP = 32
DIRECT_INDICES = 3072  # up to here an embedding's gradients are summed without sorting
ROWS_A_THREAD = 10


def flash_backward(gradient: Tensor, query: Tensor, *_: Any, **__: Any) -> int:
    """Return the bytes for the query's gradient in FP32, and one sum per row."""
    rows, heads, length, width = query.shape
    padded = _up(length, 128)
    return rows * heads * padded * FLOAT * (_up(width, 32) + 1)


def embedding_backward(gradient: Tensor, indices: Tensor, words: int, *_: Any, **__: Any) -> int:
    """Return the bytes for sorted indices and partial sums of rows."""
    count = indices.numel()
    if count <= DIRECT_INDICES:
        return 0
    parts = count // ROWS_A_THREAD + min(count, words)
    return 4 * count * INDEX + parts * _up(gradient.shape[-1], WARP) * FLOAT


def row_sum(input: Tensor, dims: Sequence[int] | None = None, *_: Any, **__: Any) -> int:
    """Return the bytes for a sum over the leading dimensions of a row-major tensor, such as a bias's gradient."""
    leading = len(dims or ())
    if not 0 < leading < input.dim() or {dim % input.dim() for dim in dims or ()} != {*range(leading)}:
        return 0
    if not input.is_contiguous() or not input.numel():
        return 0
    rows = math.prod(input.shape[:leading])
    return row_sum_buffer(rows, input.numel() // rows)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


SCRATCH: dict[Any, Scratch] = {
    ATEN._scaled_dot_product_flash_attention_backward.default: flash_backward,
    ATEN.embedding_dense_backward.default: embedding_backward,
    ATEN.sum.dim_IntList: row_sum,
    ATEN.mean.dim: row_sum,
}
