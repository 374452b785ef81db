"""Round to a format in one read and one write; ``cast`` defines the same in a dozen passes.

Rounding to nearest gives the reference's result to the last bit; stochastic rounding has the same probabilities with
other random numbers. A magnitude is rounded by adding and subtracting a power of two whose last bit is the spacing of
the format's values there: the hardware's own rounding, ties to even. A format with FP32's exponent range only drops
bits, always the same number.

Block formats are processed in tiles with blocks along the rows or along the columns, whichever matches memory, so that
nothing is transposed. MX scales are powers of two, which change no bits; a quotient by NVFP4's two scales is rounded as
if it were exact, by comparing with the exact tie. The first of NVFP4's two passes keeps the largest magnitude of each
block, so that in the second only one thread computes a block's scale.
"""

# Constants of a Triton kernel are arguments in capitals, and its branches are taken when it is compiled.
# ruff: noqa: N803, N806, SIM108

from __future__ import annotations

import triton
import triton.language as tl

_SIGN = tl.constexpr(-(2**31))
_MASK = tl.constexpr(2**31 - 1)
_INFINITY = tl.constexpr(0x7F800000)  # and the mask of an exponent
_NAN = tl.constexpr(0x7FC00000)
_FP32_MAX = tl.constexpr((2 - 2.0**-23) * 2.0**127)
_ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass every test of randomness (Salmon et al. 2011)
_LOWEST_SHARED = tl.constexpr(-127)  # exponent of an E8M0
_HIGH_HALF = tl.constexpr(-(2**12))  # of a significand: products of it with a few bits are exact


@triton.jit
def _wide_bits(values):
    if values.dtype == tl.int16:  # BF16, in Triton's interpreter: the upper half of an FP32
        bits = values.to(tl.int32) << 16
    else:
        bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _narrow(bits, DTYPE: tl.constexpr):
    if tl.int16 == DTYPE:  # BF16, rounded to nearest even on its bits: Triton's interpreter would truncate
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrow = tl.where((bits & _MASK) > _INFINITY, (bits >> 16) | 0x40, rounded).to(tl.int16)
    else:
        narrow = bits.to(tl.float32, bitcast=True).to(DTYPE)
    return narrow


@triton.jit
def _random(seed, tile, SIZE: tl.constexpr):
    """Return a random word for each value of a tile."""
    places = tile.to(tl.int64) * (SIZE // 4) + tl.arange(0, SIZE // 4)
    a, b, c, d = tl.randint4x(tl.load(seed), places, _ROUNDS)
    return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [SIZE]).to(tl.uint32, bitcast=True)


@triton.jit
def _unit(bits, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Return the spacing of the format's values around a magnitude, as the bits of an FP32."""
    return tl.maximum(bits & _INFINITY, (LOWEST + 127) << 23) - (MANTISSA << 23)


@triton.jit
def _nearest(bits, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, CEILING: tl.constexpr, WIDE: tl.constexpr):
    """Round the bits of magnitudes to nearest, ignoring the format's maximum; NaN becomes a value beyond it."""
    bits = tl.minimum(bits, CEILING)
    if WIDE:
        DROP: tl.constexpr = 23 - MANTISSA
        rounded = (bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) & -(1 << DROP)
    else:
        adder = (_unit(bits, MANTISSA, LOWEST) + (23 << 23)).to(tl.float32, bitcast=True)
        rounded = ((bits.to(tl.float32, bitcast=True) + adder) - adder).to(tl.int32, bitcast=True)
    return rounded


@triton.jit
def _by_chance(bits, random, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, CEILING: tl.constexpr, WIDE: tl.constexpr):
    """Round the bits of magnitudes stochastically: up with a probability equal to the distance."""
    bits = tl.minimum(bits, CEILING)
    if WIDE:
        BELOW: tl.constexpr = (1 << (23 - MANTISSA)) - 1
        rounded = (bits + (random.to(tl.int32, bitcast=True) & BELOW)) & -(BELOW + 1)
    else:
        unit = _unit(bits, MANTISSA, LOWEST)
        inverse = ((254 << 23) - unit).to(tl.float32, bitcast=True)
        units = bits.to(tl.float32, bitcast=True) * inverse
        below = units.to(tl.int32)
        share = ((units - below.to(tl.float32)) * 4294967296.0).to(tl.uint32)
        made = (below + (random < share).to(tl.int32)).to(tl.float32) * unit.to(tl.float32, bitcast=True)
        rounded = made.to(tl.int32, bitcast=True)
    return rounded


@triton.jit
def _with_sign(magnitude, bits, SIGNED_ZERO: tl.constexpr):
    signed = magnitude | (bits & _SIGN)
    if not SIGNED_ZERO:
        signed = tl.where(magnitude == 0, 0, signed)
    return signed


@triton.jit
def scalar_kernel(
    source, target, n, largest, seed,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, CEILING: tl.constexpr, WIDE: tl.constexpr,
    MAX: tl.constexpr, MAX_BITS: tl.constexpr, BEYOND: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    SCALED: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round to a scalar format. SCALED: scale the ``largest`` magnitude to the format's maximum, round, scale back."""
    tile = tl.program_id(0)
    offsets = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = _wide_bits(tl.load(source + offsets, mask=offsets < n, other=0))
    magnitude = bits & _MASK
    scale = 1.0
    if SCALED:
        amax = tl.load(largest)
        usable = (amax > 0.0) & (amax < float("inf"))
        of_format = amax * 0.0 + MAX  # a tensor, as div_rn needs
        scale = tl.where(usable, tl.minimum(tl.div_rn(of_format, amax), _FP32_MAX), 1.0)
        magnitude = (magnitude.to(tl.float32, bitcast=True) * scale).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        rounded = _by_chance(magnitude, _random(seed, tile, BLOCK), MANTISSA, LOWEST, CEILING, WIDE)
    else:
        rounded = _nearest(magnitude, MANTISSA, LOWEST, CEILING, WIDE)
    rounded = tl.where(rounded > MAX_BITS, BEYOND, rounded)
    rounded = tl.where(magnitude > _INFINITY, _NAN, rounded)
    rounded = _with_sign(rounded, bits, SIGNED_ZERO)
    if SCALED:
        rounded = tl.div_rn(rounded.to(tl.float32, bitcast=True), scale).to(tl.int32, bitcast=True)
    tl.store(target + offsets, _narrow(rounded, target.dtype.element_ty), mask=offsets < n)


@triton.jit
def _tile(
    tile, lines, length, inner,
    SIZE: tl.constexpr, OTHERS: tl.constexpr, ACROSS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Return a tile's start, the offsets of its values from there, and the mask of those that exist.

    Memory is [lines, length, inner], and blocks are along the length. AXIS 1 (inner is 1): ``OTHERS`` blocks, one per
    row of the tile, ``ACROSS`` from each line. AXIS 0: one block from each of ``OTHERS`` neighbouring columns.
    """
    if AXIS == 1:
        tiles = tl.cdiv(length, SIZE * ACROSS)
        line = (tile // tiles).to(tl.int64) * (OTHERS // ACROSS)
        first = tile % tiles * (SIZE * ACROSS)
        down = tl.arange(0, OTHERS) // ACROSS
        place = (tl.arange(0, OTHERS) % ACROSS * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
        start = line * length + first
        offsets = down[:, None] * length + place
        inside = (line + down < lines)[:, None] & (first + place < length)
    else:
        tiles = tl.cdiv(inner, OTHERS)
        per_line = tl.cdiv(length, SIZE)
        first = tile // tiles % per_line * SIZE
        column = tile % tiles * OTHERS + tl.arange(0, OTHERS)
        place = tl.arange(0, SIZE)
        start = ((tile // tiles // per_line).to(tl.int64) * length + first) * inner
        offsets = place[:, None] * inner + column[None, :]
        inside = (first + place < length)[:, None] & (column < inner)[None, :]
    return start, offsets, inside


@triton.jit
def largest_kernel(
    source, of_blocks, largest, lines, length, inner,
    SIZE: tl.constexpr, OTHERS: tl.constexpr, ACROSS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Write the largest magnitude of each block, and the bits of the largest finite one to ``largest``, 0 before."""
    tile = tl.program_id(0)
    start, offsets, inside = _tile(tile, lines, length, inner, SIZE, OTHERS, ACROSS, AXIS)
    bits = tl.max(_wide_bits(tl.load(source + start + offsets, mask=inside, other=0)) & _MASK, axis=AXIS)
    tl.store(of_blocks + _blocks_of(tile, OTHERS), _narrow(bits, of_blocks.dtype.element_ty))
    of_tile = tl.max(tl.where(bits < _INFINITY, bits, 0), axis=0)
    # Few tiles raise the maximum; the others skip the contended atomic.
    tl.atomic_max(largest, of_tile, mask=of_tile > tl.load(largest), sem="relaxed")


@triton.jit
def _blocks_of(tile, OTHERS: tl.constexpr):
    """Return the offsets of a tile's blocks among all blocks."""
    return tile.to(tl.int64) * OTHERS + tl.arange(0, OTHERS)


@triton.jit
def _beyond(values, others, factor, whole):
    """Return ``values - others * factor * whole`` with an exact sign.

    ``others`` and ``factor`` have few bits, so that their product with half a significand is exact.
    """
    high = (whole.to(tl.int32, bitcast=True) & _HIGH_HALF).to(tl.float32, bitcast=True)
    return tl.fma(-others, factor * (whole - high), tl.fma(-others, factor * high, values))


@triton.jit
def _quotient(values, inverse, factor, whole, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX: tl.constexpr):
    """Return ``values / (factor * whole)``, rounded to nearest and at most MAX; ``inverse`` approximates 1 / divisor.

    An approximate quotient finds the interval between two values of the format; comparing with the exact tie decides
    between them. A quotient that falls into the next interval is near its end, and gives the same value.

    There is no conversion to an integer, which would cost as much as eight additions, and every product that is added
    to is exact, so fused multiply-add gives the same result.
    """
    HALF: tl.constexpr = 0.5 ** (MANTISSA + 1)  # half the spacing of values at 1
    ADDER: tl.constexpr = 1.5 * 2.0 ** (23 - MANTISSA)  # at 1, its last bit is that spacing
    quotient = values * inverse
    power = tl.maximum(quotient.to(tl.int32, bitcast=True) & _INFINITY, (LOWEST + 127) << 23)
    power = power.to(tl.float32, bitcast=True)
    added = tl.fma(power, ADDER, tl.fma(power, -HALF, quotient))
    below = tl.fma(power, -ADDER, added)
    beyond = _beyond(values, tl.fma(power, HALF, below), factor, whole)
    # The last bit of ``added`` shows which value is even: at an exact tie, an odd one goes up.
    up = (beyond.to(tl.int32, bitcast=True) | (added.to(tl.int32, bitcast=True) & 1)) > 0
    return tl.minimum(tl.where(up, tl.fma(power, 2 * HALF, below), below), MAX)


@triton.jit
def _two_scales(of_blocks, largest, MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
                SMALLEST: tl.constexpr, SCALE_MAX: tl.constexpr):  # fmt: skip
    """Return each block's scale (NaN if not finite), the tensor's scale, and a factor ``lift`` against underflow.

    If products would underflow FP32, everything is compared 2**64 times larger.
    """
    amax = tl.load(largest).to(tl.float32, bitcast=True)
    of_format = amax * 0.0 + MAX * SCALE_MAX  # a tensor, as div_rn needs
    whole = tl.div_rn(amax, of_format)
    whole = tl.where(whole > 0.0, whole, 1.0)
    lift = tl.where(whole < 2.0**-60, 2.0**64, 1.0)
    inverse = 1.0 / (MAX * (whole * lift))
    scale = _quotient(of_blocks * lift, inverse, MAX, whole * lift, MANTISSA, LOWEST, SCALE_MAX)
    scale = tl.where(scale > 0.0, scale, SMALLEST)
    return tl.where(of_blocks < float("inf"), scale, float("nan")), whole, lift


@triton.jit
def block_kernel(
    source, target, lines, length, inner, of_blocks, largest, seed,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, CEILING: tl.constexpr, MAX: tl.constexpr, MAX_BITS: tl.constexpr,
    TOP: tl.constexpr, SCALES_UP: tl.constexpr, TENSOR_SCALE: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr, SCALE_LOWEST: tl.constexpr,
    SCALE_SMALLEST: tl.constexpr, SCALE_MAX: tl.constexpr, STOCHASTIC: tl.constexpr,
    SIZE: tl.constexpr, OTHERS: tl.constexpr, ACROSS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Round to a block format: TOP is the exponent of its elements' largest value.

    TENSOR_SCALE: ``largest_kernel`` has computed ``of_blocks`` and ``largest``, from which the FP32 scale of the whole
    tensor follows.
    """
    tile = tl.program_id(0)
    start, offsets, inside = _tile(tile, lines, length, inner, SIZE, OTHERS, ACROSS, AXIS)
    bits = _wide_bits(tl.load(source + start + offsets, mask=inside, other=0))
    if TENSOR_SCALE:
        of_block = _wide_bits(tl.load(of_blocks + _blocks_of(tile, OTHERS))).to(tl.float32, bitcast=True)
        scale, whole, lift = _two_scales(
            of_block, largest, MAX, SCALE_MANTISSA, SCALE_LOWEST, SCALE_SMALLEST, SCALE_MAX
        )
        inverse = tl.expand_dims(1.0 / (scale * (whole * lift)), AXIS)
        scale = tl.expand_dims(scale, AXIS)
        magnitude = tl.abs(bits.to(tl.float32, bitcast=True)) * lift
        elements = _quotient(magnitude, inverse, scale, whole * lift, MANTISSA, LOWEST, MAX)
        if STOCHASTIC:  # values that the format can represent must not change
            exact = _beyond(magnitude, elements, scale, whole * lift) == 0
            elements = tl.where(exact, elements, magnitude * inverse)
    else:
        of_block = tl.max(bits & _MASK, axis=AXIS, keep_dims=True)
        finite = of_block < _INFINITY
        magnitude = tl.where(finite, bits & _MASK, 0).to(tl.float32, bitcast=True)
        whole = 1.0
        shared = (of_block >> 23) - 127 - TOP
        if SCALES_UP:
            shared += ((of_block & 0x7FFFFF) > (MAX_BITS & 0x7FFFFF)).to(tl.int32)
        shared = tl.maximum(shared, _LOWEST_SHARED)
        scale = tl.where(shared == _LOWEST_SHARED, 1 << 22, (shared + 127) << 23).to(tl.float32, bitcast=True)
        elements = magnitude * ((127 - shared) << 23).to(tl.float32, bitcast=True)
    if STOCHASTIC:
        random = tl.reshape(_random(seed, tile, SIZE * OTHERS), elements.shape)
        rounded = _by_chance(elements.to(tl.int32, bitcast=True), random, MANTISSA, LOWEST, CEILING, False)
        elements = tl.minimum(rounded, MAX_BITS).to(tl.float32, bitcast=True)
    elif not TENSOR_SCALE:
        rounded = _nearest(elements.to(tl.int32, bitcast=True), MANTISSA, LOWEST, CEILING, False)
        elements = tl.minimum(rounded, MAX_BITS).to(tl.float32, bitcast=True)
    made = _with_sign((elements * scale * whole).to(tl.int32, bitcast=True), bits, True)
    if not TENSOR_SCALE:
        made = tl.where(finite, made, _NAN)
    tl.store(target + start + offsets, _narrow(made, target.dtype.element_ty), mask=inside)
