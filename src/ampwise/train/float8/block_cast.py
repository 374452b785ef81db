"""Cast a matrix to E4M3 with a scale for each block: 1×128 for activations and gradients, 128×128 for weights.

A 1×128 block is part of a row where the matrix is row-major, and part of a column where it is transposed: a matmul
contracts over rows of both its operands, and their scales must be the same within a block of what it adds up. A tile of
128×128 serves both directions. ``cast_blocks_reference`` defines what the kernels must do, and is used without a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ampwise.train.float8.fp8_cast import E4M3, TOPS, CastTensors, register_op, scales_of

__all__ = [
    "BLOCK",
    "BlockMatrix",
    "block_scales",
    "cast_blocks_reference",
    "cast_to_strips",
    "cast_to_tiles",
    "empty_blocks",
    "spread_blocks",
]

BLOCK = 128  # values that share a scale, along each direction in which a block is not one value wide


class BlockMatrix(NamedTuple):
    """A matrix in E4M3, with the inverses of its scales.

    The inverses of 1×128 blocks are stored block by block, of 128×128 blocks row by row: as cuBLAS reads them.
    """

    rows: Tensor  # row-major; empty if not requested
    columns: Tensor  # transposed; empty if not requested. With 1×128 blocks, padded with zeros to a multiple of 128
    of_rows: Tensor  # strips: blocks in a row × rows. Tiles: tiles down × tiles across
    of_columns: Tensor  # strips: blocks in a column × columns. Tiles: the same of the transposed matrix
    sums: Tensor  # of the columns as they were, in FP32; empty if not requested


def cast_to_strips(x: Tensor, *, rows: bool, columns: bool, sums: bool = False) -> BlockMatrix:
    """Cast an activation or gradient with a scale for each 1×128 block. A block with inf or NaN becomes NaN."""
    return _cast(x, False, rows, columns, sums)


def cast_to_tiles(x: Tensor, *, rows: bool, columns: bool) -> BlockMatrix:
    """Cast a weight with a scale for each 128×128 block. A block with inf or NaN becomes NaN."""
    return _cast(x, True, rows, columns, False)


def _cast(x: Tensor, tiles: bool, rows: bool, columns: bool, sums: bool) -> BlockMatrix:
    if torch.compiler.is_compiling() and x.device.type == "cuda":
        from ampwise.train.float8.block_kernel import cast_blocks_by_kernels

        return BlockMatrix(*cast_blocks_by_kernels(x, tiles, rows, columns, sums))
    return BlockMatrix(*cast_blocks(x, tiles, rows, columns, sums))


def _cast_here(x: Tensor, tiles: bool, rows: bool, columns: bool, sums: bool) -> CastTensors:
    if x.device.type != "cuda":
        return cast_blocks_reference(x, tiles, rows, columns, sums)
    from ampwise.train.float8.block_kernel import launch_cast_blocks  # Triton, which only a GPU needs

    return launch_cast_blocks(x, tiles, rows, columns, sums)


cast_blocks = register_op(
    "cast_blocks(Tensor x, bool tiles, bool rows, bool columns, bool sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cast_here,
    lambda x, *how: empty_blocks(x, *how),
)


def empty_blocks(x: Tensor, tiles: bool, rows: bool, columns: bool, sums: bool) -> CastTensors:
    """Return empty tensors for the fields of a BlockMatrix."""
    height, width = x.shape
    down, across = blocks_in(height), blocks_in(width)
    filled = height if tiles else down * BLOCK
    of_rows, of_columns = ((down, across), (across, down)) if tiles else ((across, height), (down, width))
    return (
        x.new_empty((height, width) if rows else (0, 0), dtype=E4M3),
        x.new_empty((width, filled) if columns else (0, 0), dtype=E4M3),
        x.new_empty(of_rows if rows else (0, 0), dtype=torch.float32),
        x.new_empty(of_columns if columns else (0, 0), dtype=torch.float32),
        x.new_empty(width if sums else 0, dtype=torch.float32),
    )


def blocks_in(size: int) -> int:
    """Return how many blocks a row or a column of this size has; the last may be shorter."""
    return (size + BLOCK - 1) // BLOCK


def block_scales(x: Tensor, height: int, width: int, top: int = TOPS[E4M3]) -> Tensor:
    """Return the scale of each block of a matrix, a power of two; NaN for a block with inf or NaN."""
    size, inner = x.shape
    padded = F.pad(x.float().abs(), (0, -inner % width, 0, -size % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    amax = blocks.amax((1, 3))
    return torch.where(amax.isfinite(), scales_of(amax, top), torch.nan)


def spread_blocks(values: Tensor, height: int, width: int, shape: torch.Size) -> Tensor:
    """Return a matrix of this shape with each block's value at its places."""
    spread = values.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return spread[: shape[0], : shape[1]]


def cast_blocks_reference(x: Tensor, tiles: bool, rows: bool, columns: bool, sums: bool = False) -> CastTensors:
    """Cast with torch operations; the definition of what the kernels compute."""
    by_rows, by_columns, of_rows, of_columns, by_sums = empty_blocks(x, tiles, rows, columns, sums)
    if rows:
        scales = block_scales(x, BLOCK if tiles else 1, BLOCK)
        by_rows = _round(x, scales, BLOCK if tiles else 1)
        of_rows = 1 / scales if tiles else (1 / scales).t().contiguous()
    if columns:
        standing = x.t() if tiles else F.pad(x.t(), (0, -x.shape[0] % BLOCK))
        scales = block_scales(standing, BLOCK if tiles else 1, BLOCK)
        by_columns = _round(standing, scales, BLOCK if tiles else 1)
        of_columns = 1 / scales if tiles else (1 / scales).t().contiguous()
    return by_rows, by_columns, of_rows, of_columns, x.float().sum(0) if sums else by_sums


def _round(x: Tensor, scales: Tensor, height: int) -> Tensor:
    return (x.float() * spread_blocks(scales, height, BLOCK, x.shape)).to(E4M3).contiguous()
