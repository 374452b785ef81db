"""Casts to E4M3 with a scale for each block, and matmuls of what they return, on a GPU.

The references in ``block_cast`` and ``block_matmul`` define the results: of the casts bit for bit. How tiles are
transposed, and why not otherwise, is said in ``kernel``.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803, SIM108

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampwise.numbers.census.launch import launching_on
from ampwise.train.float8.block_cast import BLOCK, empty_blocks
from ampwise.train.float8.fp8_cast import E4M3, TOPS, CastTensors
from ampwise.train.float8.kernel import FP32_MAX, bytes_at, codes_of, exponent_for, launch_transpose, power_of_two
from ampwise.train.float8.kernel import tiles_of as programs_of

__all__ = [
    "cast_blocks_by_kernels",
    "cast_strips_kernel",
    "cast_tiles_kernel",
    "launch_cast_blocks",
    "launch_multiply",
    "multiply_blocks_kernel",
    "multiply_by_kernel",
    "tuned_multiply_kernel",
]

WARPS = 8  # of a cast: 64 values of a tile for each thread
GROUPED = 8  # rows of tiles whose programs run together, so that what they read is still in the L2 cache

# Of a product: rows and columns of a tile, warps, and loads under way. The first runs where nothing is measured.
MATMUL_TILES = ((128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4), (128, 64, 4, 4))


@triton.jit
def scales_for(largest, TOP: tl.constexpr):
    """Return scales for magnitudes, given as integers, and their inverses; NaN for inf and NaN."""
    amax = largest.to(tl.float32, bitcast=True)
    exponent = exponent_for(amax, TOP)
    finite = amax <= FP32_MAX
    scale = tl.where(finite, power_of_two(exponent), float("nan"))
    return scale, tl.where(finite, power_of_two(-exponent), float("nan"))


@triton.jit
def cast_strips_kernel(
    source, by_rows, by_columns, of_rows, of_columns, sums, height, width, filled,
    TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast 128×128 values, with a scale for each of their rows, and for each of their columns where transposed."""
    step = tl.arange(0, BLOCK)
    top, left = tl.program_id(1) * BLOCK, tl.program_id(0) * BLOCK
    row, column = top + step, left + step
    inside = (row[:, None] < height) & (column[None, :] < width)
    first = top.to(tl.int64) * width + left
    place = step[:, None] * width + step[None, :]  # from the first; 32 bits take fewer registers
    tile = tl.load(source + first + place, mask=inside, other=0.0)
    if ROWS:
        x = tile.to(tl.float32)
        scale, inverse = scales_for(tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1), TOP)
        tl.store(of_rows + tl.program_id(0).to(tl.int64) * height + row, inverse, mask=row < height)
        tl.store(bytes_at(by_rows) + first + place, codes_of(x * scale[:, None], False), mask=inside)
        # Read again, from the cache: what is held from here on takes so many registers that one program at a time fits
        # on a multiprocessor, and nothing is loaded while it computes. The barrier keeps the load here.
        tl.debug_barrier()
        tile = tl.load(source + first + place, mask=inside, other=0.0)
    if SUMS:
        by_column = tl.sum(tile.to(tl.float32), 0)
        tl.store(sums + tl.program_id(1).to(tl.int64) * width + column, by_column, mask=column < width)
    if COLUMNS:
        # As integers, magnitudes keep their order, and NaN is the largest.
        down, undone = scales_for(tl.max(tl.abs(tile.to(tl.float32)).to(tl.int32, bitcast=True), 0), TOP)
        tl.store(of_columns + tl.program_id(1).to(tl.int64) * width + column, undone, mask=column < width)
        standing = tl.trans(tile).to(tl.float32) * down[:, None]
        start = left.to(tl.int64) * filled + top
        across = step[:, None] * filled + step[None, :]
        there = (column[:, None] < width) & (row[None, :] < filled)
        tl.store(bytes_at(by_columns) + start + across, codes_of(standing, False), mask=there)


@triton.jit
def cast_tiles_kernel(
    source, by_rows, by_columns, of_rows, of_columns, height, width,
    TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast 128×128 values with one scale; WITH_ROWS, WITH_COLUMNS: store its inverse for them."""
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < height) & (column[None, :] < width)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    tile = tl.load(source + place, mask=inside, other=0.0)
    x = tile.to(tl.float32)
    scale, inverse = scales_for(tl.max(tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1), 0), TOP)
    if WITH_ROWS:
        tl.store(of_rows + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), inverse)
    if WITH_COLUMNS:
        tl.store(of_columns + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), inverse)
    if ROWS:
        tl.store(bytes_at(by_rows) + place, codes_of(x * scale, False), mask=inside)
    if COLUMNS:
        standing = tl.trans(tile).to(tl.float32) * scale
        across = column[:, None].to(tl.int64) * height + row[None, :]
        there = (column[:, None] < width) & (row[None, :] < height)
        tl.store(bytes_at(by_columns) + across, codes_of(standing, False), mask=there)


def launch_cast_blocks(x: Tensor, tiles: bool, rows: bool, columns: bool, sums: bool) -> CastTensors:
    """Cast a matrix on its device."""
    with launching_on(x.device):
        return cast_blocks_by_kernels(x, tiles, rows, columns, sums)


def cast_blocks_by_kernels(x: Tensor, tiles: bool, rows: bool, columns: bool, sums: bool) -> CastTensors:
    """Cast a matrix on the current device; torch.compile can trace this and launches the kernels itself."""
    x = x.contiguous()
    return _cast_tiles(x, rows, columns) if tiles else _cast_strips(x, rows, columns, sums)


def _cast_strips(x: Tensor, rows: bool, columns: bool, sums: bool) -> CastTensors:
    height, width = x.shape
    by_rows, by_columns, of_rows, of_columns, nothing = empty_blocks(x, False, rows, columns, False)
    grid = (programs_of(width, BLOCK), programs_of(height, BLOCK))
    # Tiles of 32 bits cannot be transposed in the kernel: a transposed copy is cast by rows.
    in_two = columns and x.dtype == torch.float32
    by_tiles = x.new_empty((grid[1], width), dtype=torch.float32) if sums else nothing
    cast_strips_kernel[grid](
        x, by_rows, by_columns, of_rows, of_columns, by_tiles, height, width, grid[1] * BLOCK,
        TOP=TOPS[E4M3], ROWS=rows, COLUMNS=columns and not in_two, SUMS=sums, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    if in_two:
        standing = torch.nn.functional.pad(x.t(), (0, -height % BLOCK)).contiguous()
        by_columns, _, of_columns, _, _ = _cast_strips(standing, True, False, False)
    return by_rows, by_columns, of_rows, of_columns, by_tiles.sum(0) if sums else nothing


def _cast_tiles(x: Tensor, rows: bool, columns: bool) -> CastTensors:
    height, width = x.shape
    by_rows, by_columns, of_rows, of_columns, nothing = empty_blocks(x, True, rows, columns, False)
    in_two = columns and x.dtype == torch.float32
    lying = x.new_empty((height, width), dtype=E4M3) if in_two and not rows else by_rows
    cast_tiles_kernel[(programs_of(width, BLOCK), programs_of(height, BLOCK))](
        x, lying, by_columns, of_rows, of_columns, height, width,
        TOP=TOPS[E4M3], ROWS=rows or in_two, COLUMNS=columns and not in_two, WITH_ROWS=rows, WITH_COLUMNS=columns,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    if in_two:
        launch_transpose(lying, by_columns)
    return by_rows, by_columns, of_rows, of_columns, nothing


@triton.jit
def multiply_blocks_kernel(
    a, b, of_a, of_b, bias, out, height, width, inner,
    TILES: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile: each 128 of what is contracted by itself, then their sum in FP32. WHOLE: no block is shorter.

    BLOCK_COLUMNS divides 128, so that one 128×128 block at a time belongs to a tile.
    """
    across = tl.cdiv(width, BLOCK_COLUMNS)
    group = tl.program_id(0) // (GROUPED * across)
    rows = tl.minimum(tl.cdiv(height, BLOCK_ROWS) - group * GROUPED, GROUPED)
    within = tl.program_id(0) % (GROUPED * across)
    down, right = group * GROUPED + within % rows, within // rows
    row = down * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = right * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # Beyond the end, read from the beginning: what is computed of it is not stored.
    row_read, column_read = row % height, column % width
    step = tl.arange(0, BLOCK)
    a_at = a + row_read[:, None].to(tl.int64) * inner + step[None, :]
    b_at = b + column_read[None, :].to(tl.int64) * inner + step[:, None]
    blocks = tl.cdiv(inner, BLOCK)
    of_a_at = of_a + row_read
    if TILES:
        of_b_at = of_b + (right * BLOCK_COLUMNS // BLOCK) * blocks
    else:
        of_b_at = of_b + column_read
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for block in range(blocks):
        if WHOLE:
            x = tl.load(a_at)
            y = tl.load(b_at)
        else:
            left = inner - block * BLOCK
            x = tl.load(a_at, mask=step[None, :] < left, other=0.0)
            y = tl.load(b_at, mask=step[:, None] < left, other=0.0)
        product = tl.dot(x, y)
        if TILES:
            total += product * (tl.load(of_a_at) * tl.load(of_b_at))[:, None]
            of_b_at += 1
        else:
            total += product * tl.load(of_a_at)[:, None] * tl.load(of_b_at)[None, :]
            of_b_at += width
        of_a_at += height
        a_at += BLOCK
        b_at += BLOCK
    if BIAS:
        total += tl.load(bias + column_read)[None, :].to(tl.float32)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row[:, None] < height) & (column[None, :] < width)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


# Measured once for each size, on a GPU; in Triton's interpreter there is nothing to measure.
_runs = isinstance(multiply_blocks_kernel, triton.runtime.JITFunction)
tuned_multiply_kernel = triton.autotune(
    [
        triton.Config({"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns}, num_warps=warps, num_stages=stages)
        for rows, columns, warps, stages in (MATMUL_TILES if _runs else MATMUL_TILES[:1])
    ],
    key=["height", "width", "inner", "TILES"],
)(multiply_blocks_kernel)


def launch_multiply(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype, tiles: bool, tuned: bool
) -> Tensor:
    """Multiply on the matrices' device."""
    with launching_on(a.device):
        return multiply_by_kernel(a, b, of_a, of_b, bias, dtype, tiles, tuned)


def multiply_by_kernel(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype, tiles: bool, tuned: bool
) -> Tensor:
    """Multiply on the current device; torch.compile can trace this and launches the kernel itself.

    tuned: measure which tile is the fastest, once for each size. Where cuBLAS does most matmuls, that is not worth it.
    """
    (height, inner), width = a.shape, b.shape[0]
    out = a.new_empty((height, width), dtype=dtype)
    given = (a, b, of_a, of_b, of_a if bias is None else bias, out, height, width, inner)
    constants = {"TILES": tiles, "BIAS": bias is not None, "WHOLE": inner % BLOCK == 0, "BLOCK": BLOCK}

    def grid(chosen):
        return (triton.cdiv(height, chosen["BLOCK_ROWS"]) * triton.cdiv(width, chosen["BLOCK_COLUMNS"]),)

    if tuned:
        tuned_multiply_kernel[grid](*given, **constants, GROUPED=GROUPED)
    else:
        rows, columns, warps, stages = MATMUL_TILES[0]
        multiply_blocks_kernel[grid](
            *given, **constants, GROUPED=GROUPED, BLOCK_ROWS=rows, BLOCK_COLUMNS=columns, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    return out
