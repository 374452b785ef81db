"""The cast on a GPU: one read of a matrix, and two writes of a quarter or half its bytes.

``casting.reference`` defines what it must leave, bit for bit. Bytes are transposed and stored as integers, and values
cut off by comparisons: Triton has been seen to store garbage where an FP8 tile is stored transposed beside its
NaN-propagating minimum and maximum (triton-lang/triton#11111).
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803, SIM108

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampwise.census.launch import launching_on
from ampwise.float8.casting import E4M3, E5M2, LIMITS, TOPS, empty

__all__ = ["cast_kernel", "launch_cast", "transpose_kernel"]

BLOCK_ROWS, BLOCK_COLUMNS = 128, 64  # a transposed row of 128 bytes is a whole line of memory
WARPS, TRANSPOSING_WARPS = 8, 4

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
def cast_kernel(
    source, number, by_rows, by_columns, facts, height, width, filled,
    LIMIT: tl.constexpr, TOP: tl.constexpr, CURRENT: tl.constexpr, E5M2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile. ``facts`` has zeros where the scale is given: tiles add to it."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row[:, None] < height) & (column[None, :] < width)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(number)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    if CURRENT:
        exponent = _exponent_for(given, TOP)
        scale = _power_of_two(exponent)
        if first:
            tl.store(facts, tl.where(given < _INFINITY, _power_of_two(-exponent), float("nan")))
            tl.store(facts + 1, given)
            tl.store(facts + 2, 0.0)
    else:
        scale = given
        if first:
            tl.store(facts, 1.0 / given)
    magnitude = tl.abs(x)
    finite = magnitude < _INFINITY
    scaled = x * scale
    beyond = (tl.abs(scaled) > LIMIT) & finite
    values = tl.where(beyond, tl.where(x < 0, -LIMIT, LIMIT), scaled)
    values = tl.where(finite, values, float("nan"))
    if not CURRENT:
        # Magnitudes as integers: in their order, with what is not finite at the end, NaN too.
        largest = tl.max(tl.max(magnitude.to(tl.int32, bitcast=True), 1), 0)
        tl.atomic_max((facts + 1).to(tl.pointer_type(tl.int32)), largest)
        cut_off = tl.sum(tl.sum(beyond.to(tl.int32), 1), 0)
        if cut_off > 0:
            tl.atomic_add(facts + 2, cut_off.to(tl.float32))
    if ROWS:
        tl.store(by_rows + place, _codes(values, E5M2), mask=inside)
    if COLUMNS:
        across = column[:, None].to(tl.int64) * filled + row[None, :]
        there = (column[:, None] < width) & (row[None, :] < filled)
        tl.store(by_columns + across, tl.trans(_codes(values, E5M2)), mask=there)


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
    x: Tensor, number: Tensor, current: bool, e5m2: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix."""
    x = x.contiguous()  # which it was when torch.compile traced it, and need not be when it runs
    by_rows, by_columns, facts = empty(x, e5m2, rows, columns)
    if not current:
        facts.zero_()
    height, width = x.shape
    dtype = E5M2 if e5m2 else E4M3
    to_fill = by_columns.shape[1] if columns else height
    # At least one tile, which leaves the facts of a matrix without values.
    grid = (max(triton.cdiv(width, BLOCK_COLUMNS), 1), max(triton.cdiv(to_fill, BLOCK_ROWS), 1))
    # Of a tile that is read in FP32, Triton 3.6 transposes the bytes into a wrong order (seen on an H200): the bytes
    # are written first, read again and transposed then. Matrices of FP32 are weights, which are few.
    in_two = columns and x.dtype == torch.float32
    lying = x.new_empty((height, width), dtype=dtype) if in_two and not rows else by_rows
    with launching_on(x.device):
        cast_kernel[grid](
            x, number, lying.view(torch.uint8), by_columns.view(torch.uint8), facts, height, width, to_fill,
            LIMIT=LIMITS[dtype], TOP=TOPS[dtype], CURRENT=current, E5M2=e5m2,
            ROWS=rows or in_two, COLUMNS=columns and not in_two,
            BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        if in_two:
            transpose_kernel[grid](
                lying.view(torch.uint8), by_columns.view(torch.uint8), height, width, to_fill,
                BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=TRANSPOSING_WARPS,
            )  # fmt: skip
    return by_rows, by_columns, facts
