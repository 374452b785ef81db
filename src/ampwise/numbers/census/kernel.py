"""Count on a GPU: one Triton launch over all tensors, whatever their number and sizes.

Each program counts one chunk of one tensor. ``count_row.py`` defines what it must count, and ``launch.py`` calls it.

The histogram keeps up with memory bandwidth because it is built in shared memory, with NVIDIA's instruction for an
atomic add: the hardware merges lanes of a warp that hit the same counter. Triton cannot express that, so a few lines
are PTX. Without PTX (Triton's interpreter, AMD), ``tl.histogram`` counts. ``benchmarks/results/census_gpu.json`` has
the speed of each way.

Special values (subnormals, which share an exponent field; infinities and NaN; squares out of FP32's range) show in the
chunk's counts. Such a chunk is counted again by a slower, complete method.

Gradients of a scaled loss are counted unscaled: divided by the scale, which is read on the device. The same read can
also unscale them in memory.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803, SIM102, SIM108

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024  # values at a time: two 16-byte loads of FP32 for each thread, one of BF16
SLOW_BLOCK = 256  # smaller, as the slow count needs more registers per value, which limit occupancy
CHUNK = 32768  # values for each program: enough to make clearing and reading its counters negligible
WARPS = 4  # must match the PTX below

_INFINITY = tl.constexpr(0x7F800000)
_MASK = tl.constexpr(0x7FFFFFFF)
_FIELDS = tl.constexpr(256)  # exponent field of a magnitude's predecessor; zero wraps around to the last
_WARPS = tl.constexpr(WARPS)
_SUBNORMALS = tl.constexpr(24)  # binades of FP32's subnormals, smallest normal included
_BINADES = tl.constexpr(512)  # all of FP32's, rounded up to a power of two, the last one for the uncounted
_ROW_HEAD = tl.constexpr(5)  # columns before the binades; see count_row.py

# A table of 256 counters for each warp. The declaration must appear once, so it goes with a scalar.
_DECLARE_COUNTERS = tl.constexpr(".shared .align 16 .b32 ampwise_counters[1024];\nmov.u32 $0, ampwise_counters;")


@triton.jit
def _counters(scalar):
    """Return the address of the program's counters in shared memory."""
    return tl.inline_asm_elementwise(_DECLARE_COUNTERS, "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _warp(any_tensor):
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;\nshr.u32 $0, $0, 5;", "=r,r", [any_tensor], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _clear(addresses):
    tl.inline_asm_elementwise(
        "st.shared.u32 [$1], 0;\nmov.u32 $0, 0;", "=r,r", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _add_one(addresses):
    tl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1;\nmov.u32 $0, 0;", "=r,r", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _read(addresses):
    return tl.inline_asm_elementwise(
        "ld.shared.u32 $0, [$1];", "=r,r", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _cleared_counters(scalar):
    """Return the address of the program's counters in shared memory, cleared."""
    counters = _counters(scalar)
    _clear(counters + tl.arange(0, _WARPS * _FIELDS) * 4)
    tl.debug_barrier()
    return counters


@triton.jit
def _wide_bits(values):
    return values.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _narrow(wide, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:  # rounded to nearest even on its bits: Triton's interpreter would truncate
        bits = wide.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        narrow = tl.where((bits & _MASK) > _INFINITY, quiet_nan, rounded).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        narrow = wide.to(DTYPE)
    return narrow


@triton.jit
def _load_magnitudes(pointer, offsets, n, factor, MASKED: tl.constexpr, SCALED: tl.constexpr, WRITE: tl.constexpr):
    if MASKED:
        values = tl.load(pointer + offsets, mask=offsets < n, other=0)
    else:
        values = tl.load(pointer + offsets)
    bits = _wide_bits(values)
    if SCALED:
        wide = bits.to(tl.float32, bitcast=True) * factor
        if WRITE:
            narrow = _narrow(wide, pointer.dtype.element_ty)
            if MASKED:
                tl.store(pointer + offsets, narrow, mask=offsets < n)
            else:
                tl.store(pointer + offsets, narrow)
            bits = _wide_bits(narrow)  # count what memory holds
        else:
            bits = wide.to(tl.int32, bitcast=True)
    return bits & _MASK


@triton.jit
def _add_block(
    pointer, offsets, n, factor, squares, largest, smallest, counts, mine,
    MASKED: tl.constexpr, SCALED: tl.constexpr, WRITE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    bits = _load_magnitudes(pointer, offsets, n, factor, MASKED, SCALED, WRITE)
    values = bits.to(tl.float32, bitcast=True)
    below = (bits - 1) & _MASK  # binades are closed above, and zero wraps around to the top
    field = below >> 23
    if PTX:
        _add_one(mine + field * 4)
    else:
        counts += tl.histogram(field, _FIELDS)
    return squares + values * values, tl.maximum(largest, bits), tl.minimum(smallest, below), counts


@triton.jit
def _count(
    pointer, n, factor, shared, BLOCK: tl.constexpr, SCALED: tl.constexpr, WRITE: tl.constexpr, PTX: tl.constexpr
):
    """Count a chunk fast: values by exponent field, extremes and sum of squares."""
    offsets = tl.arange(0, BLOCK)
    fields = tl.arange(0, _FIELDS)
    squares = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    smallest = tl.full([BLOCK], _MASK, tl.int32)
    counts = tl.zeros([_FIELDS], tl.int32)
    mine = offsets
    if PTX:
        mine = shared + _warp(offsets) * (_FIELDS * 4)
    full = n // BLOCK * BLOCK
    # Only the last block needs a mask: with one, loads cannot be 16 bytes wide.
    for start in tl.range(0, full, BLOCK, loop_unroll_factor=8):
        squares, largest, smallest, counts = _add_block(
            pointer, start + offsets, n, factor, squares, largest, smallest, counts, mine, False, SCALED, WRITE, PTX
        )
    if full < n:
        squares, largest, smallest, counts = _add_block(
            pointer, full + offsets, n, factor, squares, largest, smallest, counts, mine, True, SCALED, WRITE, PTX
        )
    if PTX:
        tl.debug_barrier()
        for warp in tl.static_range(_WARPS):
            counts += _read(shared + warp * (_FIELDS * 4) + fields * 4)
    padding = (BLOCK - n % BLOCK) % BLOCK
    counts -= tl.where(fields == _FIELDS - 1, padding, 0)
    return counts, tl.sum(squares), tl.max(largest), tl.min(smallest)


@triton.jit
def _add_head(row, zeros, infs, nans, largest, smallest):
    tl.atomic_add(row, zeros.to(tl.int64), mask=zeros > 0, sem="relaxed")
    tl.atomic_add(row + 1, infs.to(tl.int64), mask=infs > 0, sem="relaxed")
    tl.atomic_add(row + 2, nans.to(tl.int64), mask=nans > 0, sem="relaxed")
    tl.atomic_max(row + 3, largest.to(tl.int64), sem="relaxed")
    tl.atomic_max(row + 4, (smallest ^ _MASK).to(tl.int64), sem="relaxed")


@triton.jit
def _count_slowly(pointer, n, factor, row, shared, BLOCK: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr):
    """Count a chunk completely: subnormals by their highest bit, infinities and NaN separately, squares in FP64."""
    counts = tl.zeros([_BINADES], tl.int32)
    if PTX:
        tl.debug_barrier()  # all threads have read the counters of the fast count
        _clear(shared + tl.arange(0, _BINADES) * 4)
        tl.debug_barrier()
    squares = tl.zeros([BLOCK], tl.float64)
    largest = tl.zeros([BLOCK], tl.int32)
    smallest = tl.full([BLOCK], _MASK, tl.int32)
    zeros = tl.zeros([BLOCK], tl.int32)
    infs = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        bits = _load_magnitudes(pointer, offsets, n, factor, True, SCALED, False)
        finite = bits < _INFINITY
        finite_bits = tl.where(finite, bits, 0)
        values = finite_bits.to(tl.float32, bitcast=True).to(tl.float64)
        squares += values * values
        largest = tl.maximum(largest, finite_bits)
        zeros += ((bits == 0) & (offsets < n)).to(tl.int32)
        infs += (bits == _INFINITY).to(tl.int32)
        nans += (bits > _INFINITY).to(tl.int32)
        below = (bits - 1) & _MASK
        counted = finite & (bits > 0)
        smallest = tl.minimum(smallest, tl.where(counted, below, _MASK))
        # A subnormal's binade is the bit length of its predecessor: the exponent of that integer as a float.
        bit_length = tl.maximum((below.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)
        field = below >> 23
        binade = tl.where(field > 0, field + _SUBNORMALS - 1, bit_length)
        binade = tl.where(counted, binade, _BINADES - 1)
        if PTX:
            _add_one(shared + binade * 4)
        else:
            counts += tl.histogram(binade, _BINADES)
    binades = tl.arange(0, _BINADES)
    if PTX:
        tl.debug_barrier()
        counts = _read(shared + binades * 4)
    kept = (counts > 0) & (binades < _BINADES - 1)
    tl.atomic_add(row + _ROW_HEAD + binades, counts.to(tl.int64), mask=kept, sem="relaxed")
    _add_head(row, tl.sum(zeros), tl.sum(infs), tl.sum(nans), tl.max(largest), tl.min(smallest))
    return tl.sum(squares)


@triton.jit
def _count_chunk(
    address, start, n, factor, shared, row, sum_squares, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, SLOW_BLOCK: tl.constexpr, SCALED: tl.constexpr, WRITE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    # The host copies tensors that are not so aligned; without this hint, loads would not be vectorised.
    pointer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)) + start, 16)
    counts, squares, largest, smallest = _count(pointer, n, factor, shared, BLOCK, SCALED, WRITE, PTX)
    fields = tl.arange(0, _FIELDS)
    subnormals = tl.sum(tl.where(fields == 0, counts, 0))
    # Squares that overflow or underflow FP32 are summed again in FP64.
    representable = (squares < float("inf")) & ((squares > 1e-30) | (largest == 0))
    if (subnormals == 0) & (largest < _INFINITY) & representable:
        zeros = tl.sum(tl.where(fields == _FIELDS - 1, counts, 0))
        counted = (counts > 0) & (fields < _FIELDS - 1)
        binades = row + _ROW_HEAD + _SUBNORMALS - 1 + fields
        tl.atomic_add(binades, counts.to(tl.int64), mask=counted, sem="relaxed")
        none = zeros * 0
        _add_head(row, zeros, none, none, largest, smallest)
        tl.store(sum_squares, squares.to(tl.float64))
    else:
        if WRITE:
            tl.debug_barrier()  # other threads read what was written
        again = _count_slowly(pointer, n, factor, row, shared, SLOW_BLOCK, SCALED and not WRITE, PTX)
        tl.store(sum_squares, again)


@triton.jit
def count_program(
    addresses, sizes, kinds, first_chunks, owners, table, sums, scale,
    ROW: tl.constexpr, HAS_FP32: tl.constexpr, HAS_BF16: tl.constexpr, HAS_FP16: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, SLOW_BLOCK: tl.constexpr,
    SCALED: tl.constexpr, WRITE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add this program's chunk to its tensor's row of ``table`` (cleared before), and its sum of squares to ``sums``.

    SCALED: values are divided by ``scale`` first. WRITE: the divided values are also written to memory.
    """
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    start = (chunk - tl.load(first_chunks + owner)).to(tl.int64) * CHUNK
    n = tl.minimum(tl.load(sizes + owner) - start, CHUNK).to(tl.int32)
    address = tl.load(addresses + owner)
    kind = tl.load(kinds + owner)
    row = table + owner.to(tl.int64) * ROW
    factor = 1.0
    if SCALED:  # the reciprocal goes through FP64, as torch's does
        factor = (1.0 / tl.load(scale).to(tl.float64)).to(tl.float32)
    shared = n
    if PTX:
        shared = _cleared_counters(n)
    if HAS_FP32:
        if kind == 0:
            _count_chunk(
                address, start, n, factor, shared, row, sums + chunk, tl.float32,
                BLOCK, SLOW_BLOCK, SCALED, WRITE, PTX,
            )  # fmt: skip
    if HAS_BF16:
        if kind == 1:
            _count_chunk(
                address, start, n, factor, shared, row, sums + chunk, tl.bfloat16,
                BLOCK, SLOW_BLOCK, SCALED, WRITE, PTX,
            )  # fmt: skip
    if HAS_FP16:
        if kind == 2:
            _count_chunk(
                address, start, n, factor, shared, row, sums + chunk, tl.float16,
                BLOCK, SLOW_BLOCK, SCALED, WRITE, PTX,
            )  # fmt: skip


@triton.jit
def census_kernel(
    addresses, sizes, kinds, first_chunks, owners, table, sums, scale, cells,
    ROW: tl.constexpr, HAS_FP32: tl.constexpr, HAS_BF16: tl.constexpr, HAS_FP16: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, SLOW_BLOCK: tl.constexpr,
    SCALED: tl.constexpr, WRITE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Count all chunks. ``sums`` is ``table`` as FP64, with the chunks' sums of squares after its ``cells``."""
    count_program(
        addresses, sizes, kinds, first_chunks, owners, table, sums + cells, scale,
        ROW, HAS_FP32, HAS_BF16, HAS_FP16, CHUNK, BLOCK, SLOW_BLOCK, SCALED, WRITE, PTX,
    )  # fmt: skip
