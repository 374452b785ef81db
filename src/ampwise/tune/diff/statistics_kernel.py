"""All numbers of a comparison in one sweep over both tensors: what ``statistics._row`` defines, which reads them often.

Each program takes a stretch of both and leaves a column of a table; a second, tiny launch makes a row of it. Nothing
waits. Values become FP64 before they are subtracted and squared, so errors and products are as exact as the
reference's. Sums are of terms that are never negative, a few thousand to a lane and then as a tree: to 1e-12 at least
they are those of the reference, which adds in another order. Counts and largest values are the same to the last bit.
FP64 is slow on cards for games, where this takes some times longer than reading does.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803, SIM108

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampwise.census.launch import launching_on

__all__ = ["READ", "combine_kernel", "compare_kernel", "launch_row"]

BLOCK = 512  # values at a time: four for each thread, of each of which a dozen numbers are kept
LEAST = 8 * BLOCK  # for a program
PROGRAMS = 1024  # at most, of which the second launch makes a row in one go
WARPS = 4
COLUMNS = 13

# What the kernel can load. Of booleans, it reads the bytes.
READ = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)

_PROGRAMS = tl.constexpr(PROGRAMS)
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _wide(values):
    """In the narrowest of FP32 and FP64 that has them all."""
    if values.dtype.is_floating() and values.dtype.primitive_bitwidth < 64:
        wide = values.to(tl.float32)
    else:
        wide = values.to(tl.float64)
    return wide


@triton.jit
def _load(pointer, offsets, n, MASKED: tl.constexpr):
    """The values in FP32 or FP64."""
    if MASKED:
        values = tl.load(pointer + offsets, mask=offsets < n, other=0)
    else:
        values = tl.load(pointer + offsets)
    return _wide(values)


@triton.jit
def _is_finite(values):
    return tl.abs(values) < float("inf")  # which a NaN is not, either


@triton.jit
def _times(values, factor, SCALED: tl.constexpr):
    """In FP64."""
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
    """The statistics of one stretch of ``each`` values, into its column of the table.

    Factors are the bits of FP64 numbers: a float that is handed to a kernel arrives in FP32.
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
    largest = tl.full([BLOCK], -1.0, tl.float64)  # so that the first value is taken, be its error 0
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
    """A row of the table's columns."""
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
    """Of two contiguous tensors of one device and one size that is not 0, the row that ``statistics._row`` gives."""
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
    """Booleans as the bytes that they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _bits(factor: float) -> int:
    """
    >>> hex(_bits(1.0))
    '0x3ff0000000000000'
    """
    return int.from_bytes(struct.pack(">d", factor), signed=True)
