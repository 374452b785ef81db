"""The cast to FP8 on a GPU: one read of a matrix, and two writes of a quarter or half its bytes.

The reference in the casting module defines the results, bit for bit. Values are saturated by comparisons and stored as
integers: Triton can store garbage if an FP8 tile is stored transposed next to its NaN-propagating minimum and maximum
(triton-lang/triton#11111). A tile is transposed as it was read, in 16 bits, and rounded again, which is faster than
transposing its bytes; and on an H200, Triton 3.6 puts tiles read in 32 bits into a wrong order.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803, SIM108

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampwise.numbers.census.launch import launching_on
from ampwise.train.float8.fp8_cast import E4M3, E5M2, LIMITS, TOPS, CastTensors, empty_cast, padded_size

__all__ = [
    "FP32_MAX",
    "amax_kernel",
    "bytes_at",
    "cast_by_kernels",
    "cast_kernel",
    "codes_of",
    "exponent_for",
    "launch_amax",
    "launch_cast",
    "launch_transpose",
    "power_of_two",
    "tiles_of",
    "transpose_kernel",
]

BLOCK_ROWS, BLOCK_COLUMNS, WARPS = 128, 64, 4  # the fastest of nine tiles, or within 2% of it, for all layers tested
TRANSPOSING_ROWS = 128  # a transposed row of bytes is then a whole cache line
AMAX_BLOCK, AMAX_WARPS = 4096, 8  # values at a time: four 16-byte loads of BF16 for each thread
AMAX_PROGRAMS = 132 * 8  # enough to fill a Hopper; each adds one atomic operation

FP32_MAX = tl.constexpr((2 - 2.0**-23) * 2.0**127)  # not infinity, which torch.compile cannot write as a constant


@triton.jit
def amax_kernel(source, target, size, BLOCK: tl.constexpr):
    """Reduce one part of the values. As integers, magnitudes keep their order, and NaN is the largest."""
    first = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK * tl.num_programs(0)):
        place = first + start
        x = tl.load(source + place, mask=place < size, other=0.0).to(tl.float32)
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        largest = tl.where(bits > largest, bits, largest)
    tl.atomic_max(target.to(tl.pointer_type(tl.int32)), tl.max(largest, 0))


def launch_amax(x: Tensor, target: Tensor) -> None:
    """Write the largest magnitude of contiguous values to ``target``, which holds 0; on the current device.

    ``torch.linalg.vector_norm(x, torch.inf)`` defines it; torch.compile's reductions take several times as long.
    """
    programs = min((x.numel() + AMAX_BLOCK - 1) // AMAX_BLOCK, AMAX_PROGRAMS)
    if programs:
        amax_kernel[(programs,)](x, target, x.numel(), BLOCK=AMAX_BLOCK, num_warps=AMAX_WARPS)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_for(amax, TOP: tl.constexpr):
    """Exponent of the largest power of two that scales a magnitude to at most 1.75 · 2**TOP."""
    bits = amax.to(tl.int32, bitcast=True)
    over = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = TOP - ((bits >> 23) - 127) - over
    exponent = tl.where(exponent > 126, 126, exponent)
    return tl.where(exponent < -126, -126, exponent)


@triton.jit
def codes_of(values, E5M2: tl.constexpr):
    if E5M2:
        codes = values.to(tl.float8e5)
    else:
        codes = values.to(tl.float8e4nv)
    return codes.to(tl.uint8, bitcast=True)


@triton.jit
def bytes_at(of):
    return of.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def _fitted(x, scale, LIMIT: tl.constexpr):
    """Scale and saturate values, with NaN for inf and NaN; also return which values were saturated."""
    finite = tl.abs(x) <= FP32_MAX
    scaled = x * scale
    beyond = (tl.abs(scaled) > LIMIT) & finite
    values = tl.where(beyond, tl.where(x < 0, -LIMIT, LIMIT), scaled)
    return tl.where(finite, values, float("nan")), beyond


@triton.jit
def _add_seen(seen, x, scale, beyond, LIMIT: tl.constexpr):
    """Add a tile's largest magnitude and number of saturated values; most tiles have nothing to add."""
    # Magnitudes as integers: same order, with inf and then NaN at the end.
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True))
    amax = seen.to(tl.pointer_type(tl.int32))
    if largest > tl.load(amax):  # a stale value is never larger than the current one
        tl.atomic_max(amax, largest)
    reached = largest.to(tl.float32, bitcast=True) * scale
    if (reached > LIMIT) | (reached != reached):
        tl.atomic_add(seen + 1, tl.sum(beyond.to(tl.int32)).to(tl.float32))


@triton.jit
def cast_kernel(
    source, scales, by_rows, by_columns, inverse, seen, sums, height, width, filled,
    LIMIT: tl.constexpr, TOP: tl.constexpr, CURRENT: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SUMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast one tile. ``scales`` holds the scale, or with CURRENT the matrix's largest magnitude.

    ``seen`` holds zeros, to which tiles add unless CURRENT. ``sums`` has a row for each row of tiles.
    """
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row[:, None] < height) & (column[None, :] < width)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    tile = tl.load(source + place, mask=inside, other=0.0)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    x = tile.to(tl.float32)
    if CURRENT:
        amax = tl.load(scales)
        exponent = exponent_for(amax, TOP)
        finite = amax <= FP32_MAX
        scale = tl.where(finite, power_of_two(exponent), float("nan"))
        if first:
            tl.store(inverse, tl.where(finite, power_of_two(-exponent), float("nan")))
        values = x * scale  # all within the limit, or all NaN
    else:
        scale = tl.load(scales)
        if first:
            tl.store(inverse, 1.0 / scale)
        values, beyond = _fitted(x, scale, LIMIT)
    if ROWS:
        tl.store(bytes_at(by_rows) + place, codes_of(values, E5M2), mask=inside)
    if COLUMNS:
        standing = tl.trans(tile).to(tl.float32)
        if CURRENT:
            standing = standing * scale
        else:
            standing, _ = _fitted(standing, scale, LIMIT)
        across = column[:, None].to(tl.int64) * filled + row[None, :]
        there = (column[:, None] < width) & (row[None, :] < filled)
        tl.store(bytes_at(by_columns) + across, codes_of(standing, E5M2), mask=there)
    if SUMS:
        tl.store(sums + tl.program_id(1) * width + column, tl.sum(x, 0), mask=column < width)
    if not CURRENT:  # last: its loads and atomic operations then delay no store
        _add_seen(seen, x, scale, beyond, LIMIT)


@triton.jit
def transpose_kernel(
    source, target, height, width, filled, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """Transpose one tile of bytes, with zeros in the target's padding."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row[:, None] < height) & (column[None, :] < width)
    codes = tl.load(bytes_at(source) + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0)
    across = column[:, None].to(tl.int64) * filled + row[None, :]
    tl.store(bytes_at(target) + across, tl.trans(codes), mask=(column[:, None] < width) & (row[None, :] < filled))


def launch_cast(
    x: Tensor,
    scale: Tensor | None,
    e5m2: bool,
    rows: bool,
    columns: bool,
    sums: bool,
    into: CastTensors | None = None,
) -> CastTensors:
    """Cast a matrix on its device."""
    with launching_on(x.device):
        return cast_by_kernels(x, scale, e5m2, rows, columns, sums, into)


def cast_by_kernels(
    x: Tensor,
    scale: Tensor | None,
    e5m2: bool,
    rows: bool,
    columns: bool,
    sums: bool,
    into: CastTensors | None = None,
) -> CastTensors:
    """Cast a matrix on the current device; torch.compile can trace this and launches the kernels itself.

    into: tensors that an equal cast has returned before, without sums, to write to instead of new ones.
    """
    x = x.contiguous()  # at run time it may not be, even if it was when torch.compile traced it
    height, width = x.shape
    dtype, to_fill = (E5M2 if e5m2 else E4M3), (padded_size(height) if columns else height)
    # An FP32 matrix is cast first, then its bytes are read again and transposed. Those are weights, which are small.
    in_two = columns and x.dtype == torch.float32
    if into is None:
        by_rows, by_columns, inverse, seen, nothing = empty_cast(x, e5m2, rows, columns, False)
    else:
        by_rows, by_columns, inverse, seen, nothing = into
        seen.zero_()
    lying = x.new_empty((height, width), dtype=dtype) if in_two and not rows else by_rows
    # At least one tile, which writes the inverse even for an empty matrix.
    grid = (tiles_of(width, BLOCK_COLUMNS), tiles_of(to_fill, BLOCK_ROWS))
    by_tiles = x.new_empty((grid[1], width), dtype=torch.float32) if sums else nothing
    current = scale is None
    if current:
        seen = _amax(x, seen)
    cast_kernel[grid](
        x, seen if current else scale, lying, by_columns, inverse, seen, by_tiles, height, width, to_fill,
        LIMIT=LIMITS[dtype], TOP=TOPS[dtype], CURRENT=current, E5M2=e5m2,
        ROWS=rows or in_two, COLUMNS=columns and not in_two, SUMS=sums,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    if in_two:
        launch_transpose(lying, by_columns)
    return by_rows, by_columns, inverse, seen, by_tiles.sum(0) if sums else nothing


def launch_transpose(source: Tensor, target: Tensor) -> None:
    """Transpose a matrix of bytes into one whose rows may be longer, filled with zeros; on the current device."""
    (height, width), filled = source.shape, target.shape[1]
    transpose_kernel[(tiles_of(width, BLOCK_COLUMNS), tiles_of(filled, TRANSPOSING_ROWS))](
        source, target, height, width, filled,
        BLOCK_ROWS=TRANSPOSING_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=WARPS,
    )  # fmt: skip


def _amax(x: Tensor, seen: Tensor) -> Tensor:
    """Return statistics with the largest magnitude, and nothing saturated.

    torch.compile finds the magnitudes of rows in the kernel that makes them: a norm or an activation, or their
    backward. A weight has no such kernel.
    """
    if torch.compiler.is_compiling() and x.dtype != torch.float32 and x.numel():
        return torch.nn.functional.pad(x.abs().amax(-1).amax().float().reshape(1), (0, 1))
    launch_amax(x, seen)
    return seen


def tiles_of(size: int, of: int) -> int:
    return max((size + of - 1) // of, 1)
