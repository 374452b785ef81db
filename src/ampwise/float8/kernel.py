"""The cast on a GPU: one read of a matrix, and two writes of a quarter or half its bytes.

``casting.reference`` defines what it must leave, bit for bit. Values are cut off by comparisons and stored as integers:
Triton has been seen to store garbage where an FP8 tile is stored transposed beside its NaN-propagating minimum and
maximum (triton-lang/triton#11111). A tile is transposed as it was read, in 16 bits, and rounded once more, which is
faster than to transpose its bytes; and on an H200 Triton 3.6 puts tiles read in 32 bits into a wrong order.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803, SIM108

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampwise.census.launch import launching_on
from ampwise.float8.amax_kernel import launch_amax
from ampwise.float8.casting import AMAX, E4M3, E5M2, LIMITS, TOPS, empty

__all__ = ["cast_kernel", "launch_cast", "transpose_kernel"]

BLOCK_ROWS, BLOCK_COLUMNS, WARPS = 64, 64, 4  # the fastest of eight tiles, or within 2% of it, for all layers tried
TRANSPOSING_ROWS = 128  # a transposed row of bytes is a whole line of memory

_INFINITY = tl.constexpr(float("inf"))  # NaN cannot be such a constant: it would seem to change


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent_for(amax, TOP: tl.constexpr):
    """Of the largest power of two that takes a magnitude to no more than 1.75 · 2**TOP."""
    bits = amax.to(tl.int32, bitcast=True)
    over = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = TOP - ((bits >> 23) - 127) - over
    exponent = tl.where(exponent > 126, 126, exponent)
    return tl.where(exponent < -126, -126, exponent)


@triton.jit
def _codes(values, E5M2: tl.constexpr):
    if E5M2:
        codes = values.to(tl.float8e5)
    else:
        codes = values.to(tl.float8e4nv)
    return codes.to(tl.uint8, bitcast=True)


@triton.jit
def _fitted(x, scale, LIMIT: tl.constexpr):
    """Scaled, cut off at the limit, and NaN where not finite; and whether it was cut off."""
    finite = tl.abs(x) < _INFINITY
    scaled = x * scale
    beyond = (tl.abs(scaled) > LIMIT) & finite
    values = tl.where(beyond, tl.where(x < 0, -LIMIT, LIMIT), scaled)
    return tl.where(finite, values, float("nan")), beyond


@triton.jit
def _add_facts(facts, x, scale, beyond, LIMIT: tl.constexpr):
    """A tile's largest magnitude, and how many of its values were cut off: few tiles have anything to add."""
    # Magnitudes as integers: in their order, with what is not finite at the end, NaN too.
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True))
    amax = (facts + 1).to(tl.pointer_type(tl.int32))
    if largest > tl.load(amax):  # what is read may be of the past, and is then no larger than it is now
        tl.atomic_max(amax, largest)
    reached = largest.to(tl.float32, bitcast=True) * scale
    if (reached > LIMIT) | (reached != reached):
        tl.atomic_add(facts + 2, tl.sum(beyond.to(tl.int32)).to(tl.float32))


@triton.jit
def cast_kernel(
    source, scales, by_rows, by_columns, facts, height, width, filled,
    LIMIT: tl.constexpr, TOP: tl.constexpr, CURRENT: tl.constexpr, E5M2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile. ``facts`` has zeros, to which tiles add, or the largest magnitude where no scale is given."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row[:, None] < height) & (column[None, :] < width)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    tile = tl.load(source + place, mask=inside, other=0.0)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    if CURRENT:
        amax = tl.load(facts + 1)
        exponent = _exponent_for(amax, TOP)
        scale = _power_of_two(exponent)
        if first:
            tl.store(facts, tl.where(amax < _INFINITY, _power_of_two(-exponent), float("nan")))
    else:
        scale = tl.load(scales)
        if first:
            tl.store(facts, 1.0 / scale)
    x = tile.to(tl.float32)
    values, beyond = _fitted(x, scale, LIMIT)
    if not CURRENT:
        _add_facts(facts, x, scale, beyond, LIMIT)
    if ROWS:
        tl.store(by_rows + place, _codes(values, E5M2), mask=inside)
    if COLUMNS:
        standing, _ = _fitted(tl.trans(tile).to(tl.float32), scale, LIMIT)
        across = column[:, None].to(tl.int64) * filled + row[None, :]
        there = (column[:, None] < width) & (row[None, :] < filled)
        tl.store(by_columns + across, _codes(standing, E5M2), mask=there)


@triton.jit
def transpose_kernel(
    source, target, height, width, filled, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """One tile of bytes, transposed; zeros where the target is filled up."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row[:, None] < height) & (column[None, :] < width)
    codes = tl.load(source + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0)
    across = column[:, None].to(tl.int64) * filled + row[None, :]
    tl.store(target + across, tl.trans(codes), mask=(column[:, None] < width) & (row[None, :] < filled))


def launch_cast(
    x: Tensor, scale: Tensor | None, e5m2: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix."""
    x = x.contiguous()  # which it was when torch.compile traced it, and need not be when it runs
    by_rows, by_columns, facts = empty(x, e5m2, rows, columns)
    facts.zero_()
    height, width = x.shape
    dtype = E5M2 if e5m2 else E4M3
    to_fill = by_columns.shape[1] if columns else height
    # At least one tile, which leaves the facts of a matrix without values.
    grid = (max(triton.cdiv(width, BLOCK_COLUMNS), 1), max(triton.cdiv(to_fill, BLOCK_ROWS), 1))
    # The bytes of a matrix in FP32 are written first, then read again and transposed. Those are weights, which are few.
    in_two = columns and x.dtype == torch.float32
    lying = x.new_empty((height, width), dtype=dtype) if in_two and not rows else by_rows
    with launching_on(x.device):
        if scale is None:
            launch_amax(x, facts[AMAX])
        cast_kernel[grid](
            x, facts if scale is None else scale, lying.view(torch.uint8), by_columns.view(torch.uint8), facts,
            height, width, to_fill,
            LIMIT=LIMITS[dtype], TOP=TOPS[dtype], CURRENT=scale is None, E5M2=e5m2,
            ROWS=rows or in_two, COLUMNS=columns and not in_two,
            BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        if in_two:
            transpose_kernel[(grid[0], max(triton.cdiv(to_fill, TRANSPOSING_ROWS), 1))](
                lying.view(torch.uint8), by_columns.view(torch.uint8), height, width, to_fill,
                BLOCK_ROWS=TRANSPOSING_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=WARPS,
            )  # fmt: skip
    return by_rows, by_columns, facts
