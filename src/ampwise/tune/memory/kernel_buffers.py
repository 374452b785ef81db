"""Temporary memory that CUDA's kernels allocate while they run, where it matters.

The sizes follow torch's sources; those of attention were also read off an H200 (torch 2.11, cuDNN 9.19).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
FLOAT = 4  # bytes
INDEX = 8
WARP = 32
CUDNN_SMALL = 256
EFFICIENT_TILE, EFFICIENT_LOCK = 64, 16
DIRECT_INDICES = 3072  # up to here an embedding's gradients are summed without sorting
ROWS_A_THREAD = 10

# Of sums over rows.
MAX_THREADS = 512
WIDEST_LOAD = 4  # elements
FEWEST_A_THREAD, MOST_A_THREAD = 16, 256
THREADS_A_PROCESSOR = 2048
PROCESSORS = 132  # of an H100 or H200; the buffer depends on it only where there are very few columns


def flash_backward(gradient: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """Return the bytes for the query's gradient in FP32, and one sum per row."""
    rows, heads, length, width = query.shape
    return rows * heads * _up(length, 128) * FLOAT * (_up(width, 32) + 1) + _repeated(query, key)


def cudnn_backward(gradient: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """Return the bytes for the same, without padding."""
    return query.numel() // query.shape[-1] * FLOAT * (query.shape[-1] + 1) + CUDNN_SMALL + _repeated(query, key)


def efficient_backward(gradient: Tensor, query: Tensor, *_: Any, **__: Any) -> int:
    """Return the bytes for the query's gradient in FP32, tile by tile with a lock for each, and one sum per row."""
    rows, heads, length, width = query.shape
    side = EFFICIENT_TILE if width <= EFFICIENT_TILE else 2 * EFFICIENT_TILE
    tiles = rows * heads * -(-length // side) * -(-width // EFFICIENT_TILE)
    return tiles * (side * EFFICIENT_TILE * FLOAT + EFFICIENT_LOCK) + rows * heads * length * FLOAT


def _repeated(query: Tensor, key: Tensor) -> int:
    """Return the bytes for gradients of keys and values for every head of the queries, if they have fewer."""
    heads, fewer = query.shape[1], key.shape[1]
    return 0 if heads == fewer else 2 * key.numel() // fewer * heads * key.element_size()


def softmax_backward(gradient: Tensor, *_: Any, **__: Any) -> int:
    """Return the bytes for the gradient times the result."""
    return gradient.nbytes


def safe_softmax(scores: Tensor, *_: Any, **__: Any) -> int:
    """Return the bytes for a mark at each score that is minus infinity."""
    return scores.numel()


def embedding_backward(gradient: Tensor, indices: Tensor, words: int, *_: Any, **__: Any) -> int:
    """Return the bytes for sorted indices and partial sums of rows."""
    count = indices.numel()
    if count <= DIRECT_INDICES:
        return 0
    parts = count // ROWS_A_THREAD + min(count, words)
    return 4 * count * INDEX + parts * _up(gradient.shape[-1], WARP) * FLOAT


def embedding_bag_backward(
    gradient: Tensor, indices: Tensor, bags: Tensor, sizes: Tensor, most: Tensor, words: int, *_: Any, **__: Any
) -> int:
    """Return the bytes for the same, of sums of rows."""
    return embedding_backward(gradient, indices, words)


def row_sum(input: Tensor, dims: Sequence[int] | None = None, *_: Any, **__: Any) -> int:
    """Return the bytes for a sum over the leading dimensions of a row-major tensor, such as a bias's gradient."""
    leading = len(dims or ())
    if not 0 < leading < input.dim() or {dim % input.dim() for dim in dims or ()} != {*range(leading)}:
        return 0
    if not input.is_contiguous() or not input.numel():
        return 0
    rows = math.prod(input.shape[:leading])
    return row_sum_buffer(rows, input.numel() // rows)


def row_sum_buffer(rows: int, columns: int) -> int:
    """Return the bytes for the sum over the rows of a row-major matrix.

    With few columns and many rows, thread blocks share a column's rows and leave partial sums in a buffer in global
    memory, which is larger than necessary. The numbers follow ``setReduceConfig`` of torch's ``Reduce.cuh``.

    >>> row_sum_buffer(4096, 2048) / 2**20, row_sum_buffer(128, 2048)
    (64.0, 0)
    """
    # A thread block: the columns each thread loads at once, its width in such loads, and its height in rows.
    load = next(size for size in (WIDEST_LOAD, 2, 1) if columns % size == 0)
    most = MAX_THREADS // load
    width, height = (1 << (min(size, most).bit_length() - 1) for size in (columns // load, rows))  # powers of two
    height = min(height, most // min(width, WARP))
    width = min(width, most // height)
    if rows < min(FEWEST_A_THREAD * height, MOST_A_THREAD):
        return 0  # each thread sums a column by itself
    a_thread = -(-rows // height)
    wide = -(-(columns // load) // width)
    target = PROCESSORS * (THREADS_A_PROCESSOR // (width * height))
    if a_thread < MOST_A_THREAD or wide > target:
        return 0
    parts = max(min(-(-target // wide), -(-a_thread // FEWEST_A_THREAD)), -(-a_thread // MOST_A_THREAD))
    return FLOAT * columns * parts * width * load if parts > 1 else 0  # sums are FP32, whatever is summed


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


# By operator, the bytes that its kernel allocates while it runs, from its arguments.
SCRATCH: dict[Any, Callable[..., int]] = {
    ATEN._scaled_dot_product_flash_attention_backward.default: flash_backward,
    ATEN._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    ATEN._softmax_backward_data.default: softmax_backward,
    ATEN._safe_softmax.default: safe_softmax,
    ATEN.embedding_dense_backward.default: embedding_backward,
    ATEN._embedding_bag_dense_backward.default: embedding_bag_backward,
    ATEN.sum.dim_IntList: row_sum,
    ATEN.mean.dim: row_sum,
}
if hasattr(ATEN, "_scaled_dot_product_cudnn_attention_backward"):
    SCRATCH[ATEN._scaled_dot_product_cudnn_attention_backward.default] = cudnn_backward
