"""Compute all numbers of a comparison in one pass over both tensors, as ``statistics._row`` defines them.

Each program reduces a stretch of both tensors to a column of a table; a second, tiny launch reduces the table to a row.
Nothing syncs. Values are converted to FP64 before they are subtracted and squared, so errors and products are as exact
as the reference's. Sums have only non-negative terms, a few thousand per lane and then as a tree: they agree with the
reference, which adds in another order, to 1e-12 or better. Counts and largest values are identical. On consumer GPUs
FP64 is slow, and this takes a few times longer than reading the tensors.
"""

# Triton constants are upper-case arguments, and its branches are resolved at compile time.
# ruff: noqa: N803, SIM108

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampwise.numbers.census.launch import launching_on

BLOCK = 512  # values at a time: four per thread, with a dozen accumulators each
LEAST = 8 * BLOCK  # values of a program
PROGRAMS = 1024  # at most, so that the second launch reduces them at once
WARPS = 4
COLUMNS = 13

# Dtypes that the kernel can load; booleans are read as bytes.
READ = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)

_PROGRAMS = tl.constexpr(PROGRAMS)
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _wide(values):
    """Convert to FP32, or to FP64 where FP32 cannot hold all values."""
    if values.dtype.is_floating() and values.dtype.primitive_bitwidth < 64:
        wide = values.to(tl.float32)
    else:
        wide = values.to(tl.float64)
    return wide


@triton.jit
def _load(pointer, offsets, n, MASKED: tl.constexpr):
    """Load values as FP32 or FP64."""
    if MASKED:
        values = tl.load(pointer + offsets, mask=offsets < n, other=0)
    else:
        values = tl.load(pointer + offsets)
    return _wide(values)


@triton.jit
def _is_finite(values):
    return tl.abs(values) < float("inf")  # false for NaN, too


@triton.jit
def _times(values, factor, SCALED: tl.constexpr):
    """Convert to FP64 and multiply by the factor."""
    wide = values.to(tl.float64)
    if SCALED:
        wide = wide * factor
    return wide


@triton.jit
def _add_block(
    a, b, offsets, n, factor_a, factor_b, squares_a, squares_b, squares, largest, at, changed,
    largest_a, largest_b, some_a, some_b, bad_a, bad_b, apart, SCALED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    raw_a, raw_b = _load(a, offsets, n, MASKED), _load(b, offsets, n, MASKED)
    finite_a, finite_b = _is_finite(raw_a), _is_finite(raw_b)
    values_a, values_b = tl.where(finite_a, raw_a, 0.0), tl.where(finite_b, raw_b, 0.0)
    same = (raw_a == raw_b) | ((raw_a != raw_a) & (raw_b != raw_b))
    wide_a, wide_b = _times(values_a, factor_a, SCALED), _times(values_b, factor_b, SCALED)
    error = tl.abs(wide_b - wide_a)
    at = tl.where(error > largest, offsets, at)
    return (
        squares_a + wide_a * wide_a, squares_b + wide_b * wide_b, squares + error * error,
        tl.maximum(largest, error), at, changed + (error != 0.0).to(tl.int32),
        tl.maximum(largest_a, tl.abs(values_a)), tl.maximum(largest_b, tl.abs(values_b)),
        some_a + (raw_a != 0.0).to(tl.int32), some_b + (raw_b != 0.0).to(tl.int32),
        bad_a + (finite_a == 0).to(tl.int32), bad_b + (finite_b == 0).to(tl.int32),
        apart + (((finite_a & finite_b) | same) == 0).to(tl.int32),
    )  # fmt: skip


@triton.jit
def compare_kernel(
    a, b, table, n, each, factor_a, factor_b,
    WHOLE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one stretch of ``each`` values to its column of the table.

    Factors are passed as the bits of FP64 numbers: a float argument of a kernel arrives as FP32.
    """
    program = tl.program_id(0)
    start = program.to(tl.int64) * each
    a += start
    b += start
    count = tl.minimum(n - start, each).to(tl.int32)
    factor_a = factor_a.to(tl.int64).to(tl.float64, bitcast=True)
    factor_b = factor_b.to(tl.int64).to(tl.float64, bitcast=True)
    offsets = tl.arange(0, BLOCK)
    squares_a = tl.zeros([BLOCK], tl.float64)
    squares_b = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    largest = tl.full([BLOCK], -1.0, tl.float64)  # so that the first value counts even with an error of 0
    at = tl.zeros([BLOCK], tl.int32)
    changed = tl.zeros([BLOCK], tl.int32)
    largest_a = _wide(tl.zeros([BLOCK], a.dtype.element_ty))
    largest_b = _wide(tl.zeros([BLOCK], b.dtype.element_ty))
    some_a = tl.zeros([BLOCK], tl.int32)
    some_b = tl.zeros([BLOCK], tl.int32)
    bad_a = tl.zeros([BLOCK], tl.int32)
    bad_b = tl.zeros([BLOCK], tl.int32)
    apart = tl.zeros([BLOCK], tl.int32)
    full = count // BLOCK * BLOCK
    # Only the last block needs a mask: with one, loads cannot be 16 bytes wide.
    for first in range(0, full, BLOCK):
        (squares_a, squares_b, squares, largest, at, changed,
         largest_a, largest_b, some_a, some_b, bad_a, bad_b, apart) = _add_block(
            a, b, first + offsets, count, factor_a, factor_b, squares_a, squares_b, squares, largest, at, changed,
            largest_a, largest_b, some_a, some_b, bad_a, bad_b, apart, SCALED, False,
        )  # fmt: skip
    if full < count:
        (squares_a, squares_b, squares, largest, at, changed,
         largest_a, largest_b, some_a, some_b, bad_a, bad_b, apart) = _add_block(
            a, b, full + offsets, count, factor_a, factor_b, squares_a, squares_b, squares, largest, at, changed,
            largest_a, largest_b, some_a, some_b, bad_a, bad_b, apart, SCALED, True,
        )  # fmt: skip
    top = tl.max(largest)
    first_at = tl.min(tl.where(largest == top, at, _NOWHERE))
    cell = table + program
    tl.store(cell, tl.sum(squares_a))
    tl.store(cell + _PROGRAMS, tl.sum(squares_b))
    tl.store(cell + 2 * _PROGRAMS, tl.sum(squares))
    tl.store(cell + 3 * _PROGRAMS, top)
    tl.store(cell + 4 * _PROGRAMS, (start + first_at).to(tl.float64))
    if WHOLE:
        tl.store(cell + 5 * _PROGRAMS, tl.sum(changed).to(tl.float64))
    else:
        tl.store(cell + 5 * _PROGRAMS, 0.0)
    tl.store(cell + 6 * _PROGRAMS, _times(tl.max(largest_a), factor_a, SCALED))
    tl.store(cell + 7 * _PROGRAMS, _times(tl.max(largest_b), factor_b, SCALED))
    tl.store(cell + 8 * _PROGRAMS, tl.sum(some_a).to(tl.float64))
    tl.store(cell + 9 * _PROGRAMS, tl.sum(some_b).to(tl.float64))
    tl.store(cell + 10 * _PROGRAMS, tl.sum(bad_a).to(tl.float64))
    tl.store(cell + 11 * _PROGRAMS, tl.sum(bad_b).to(tl.float64))
    tl.store(cell + 12 * _PROGRAMS, tl.sum(apart).to(tl.float64))


@triton.jit
def combine_kernel(table, row, programs, PROGRAMS: tl.constexpr):
    """Reduce the table's columns to a row."""
    lanes = tl.arange(0, PROGRAMS)
    there = lanes < programs
    largest = tl.load(table + 3 * PROGRAMS + lanes, mask=there, other=-1.0)
    at = tl.load(table + 4 * PROGRAMS + lanes, mask=there, other=0.0)
    top = tl.max(largest)
    tl.store(row + 3, top)
    tl.store(row + 4, tl.min(tl.where(largest == top, at, float("inf"))))
    for column in tl.static_range(13):
        if column == 6 or column == 7:
            tl.store(row + column, tl.max(tl.load(table + column * PROGRAMS + lanes, mask=there, other=0.0)))
        elif column != 3 and column != 4:
            tl.store(row + column, tl.sum(tl.load(table + column * PROGRAMS + lanes, mask=there, other=0.0)))


def launch_row(a: Tensor, b: Tensor, factors: tuple[float, float]) -> Tensor:
    """Return the row that ``statistics._row`` gives, for contiguous, non-empty tensors of equal size on one device."""
    values = a.numel()
    each = max(LEAST, triton.cdiv(triton.cdiv(values, PROGRAMS), BLOCK) * BLOCK)
    programs = triton.cdiv(values, each)
    table = torch.empty(COLUMNS * PROGRAMS, dtype=torch.float64, device=b.device)
    row = torch.empty(COLUMNS, dtype=torch.float64, device=b.device)
    with launching_on(b.device):
        compare_kernel[(programs,)](
            _bytes(a), _bytes(b), table, values, each, *map(_bits, factors),
            WHOLE=not a.is_floating_point(), SCALED=factors != (1.0, 1.0), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        combine_kernel[(1,)](table, row, programs, PROGRAMS=PROGRAMS, num_warps=WARPS)
    return row


def _bytes(tensor: Tensor) -> Tensor:
    """View booleans as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _bits(factor: float) -> int:
    """Return the bits of an FP64 number as an integer.

    >>> hex(_bits(1.0))
    '0x3ff0000000000000'
    """
    return int.from_bytes(struct.pack(">d", factor), signed=True)
