"""Round a tensor's values to any format, on any device, in the tensor's own dtype.

Rounding works on the bits of FP32 (or FP64) as integers, so it gives the same result on every device and needs no
hardware support for the format. On a GPU, kernels do the same in one pass where possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.numbers.formats.catalog import find_format
from ampwise.numbers.formats.format import BlockFormat, Format

Rounding = Literal["nearest", "stochastic"]
FOUR, ROOM_FOR_FOUR = 4.0, 256.0  # of four-over-six: the other element, and the largest scale for a 6


def cast(
    tensor: Tensor,
    fmt: str | Format | BlockFormat | torch.dtype,
    rounding: Rounding = "nearest",
    *,
    saturate: bool = False,
    dim: int = -1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Round a tensor's values to ``fmt`` and return them in the tensor's own dtype.

    ``nearest`` rounds ties to even; in E8M0, which has only powers of two, ties go up. ``stochastic`` rounds up
    with a probability equal to the distance, which keeps the mean; ``generator`` makes it repeatable. Values beyond
    the format's maximum become infinity, or NaN if the format has no infinity; with ``saturate`` the maximum
    (formats with neither always saturate). NaN stays NaN, so that it is never hidden, even in formats that
    cannot hold it. Block formats choose their scales from the values, block by block along ``dim`` (the last block
    may be shorter), and always saturate. The result is detached, and is infinite where the tensor's own dtype cannot
    hold a value of ``fmt`` (65536 of BF16 in an FP16 tensor).

    ml_dtypes agrees bit by bit, except for NaN in FP6 and FP4, which it turns into zeros. torch's own casts agree
    except for E4M3, where torch 2.13 saturates like ``saturate=True``, and for zero and negatives in E8M0, which
    has neither: NaN here.

    Args:
        tensor: FP64, FP32, BF16 or FP16 values.
        fmt: a format, its name, or a torch dtype.
        rounding: ``"nearest"`` or ``"stochastic"``.
        saturate: values beyond the maximum become the maximum.
        dim: the dimension along which a block format's blocks lie.
        generator: random numbers for ``stochastic``.

    Returns:
        a new tensor of the same shape and dtype, detached.

    Raises:
        UnknownName: no such format.
        UnsupportedTensor: a dtype that cannot be rounded.

    >>> cast(torch.tensor([1e-8, 0.1, 70000.0]), "fp16")
    tensor([0.0000, 0.1000,    inf])
    >>> cast(torch.tensor([3.3, 1000.0]), "e4m3fn", saturate=True)
    tensor([  3.2500, 448.0000])
    """
    found = find_format(fmt)
    if rounding not in ("nearest", "stochastic"):
        raise BadInput(f"cast(rounding={rounding!r}): choose 'nearest' or 'stochastic'.")
    _refuse_what_has_no_values(tensor)
    most = max(tensor.dim(), 1)  # as in torch, a 0-dim tensor counts as one dimension
    if not isinstance(dim, int) or not -most <= dim < most:  # in every format, although only block formats use it
        raise BadInput(
            f"cast(dim={dim!r}): expected a dimension from {-most} to {most - 1}; the tensor has {tensor.dim()}."
        )
    if (fused := kernels_for(tensor, found)) is not None:
        return fused(
            tensor, found, dim=dim, stochastic=rounding == "stochastic", saturate=saturate, generator=generator
        )
    # FP32 holds 2**-127, E8M0's lowest value, only as a subnormal, whose exponent is not in its exponent field.
    below_fp32 = isinstance(found, Format) and found.lowest_exponent < _LAYOUTS[torch.float32].lowest_exponent
    working = torch.float64 if below_fp32 or tensor.dtype == torch.float64 else torch.float32
    wide = tensor.detach().to(working).resolve_neg()
    if isinstance(found, BlockFormat):
        rounded = _cast_blocks(wide.movedim(dim, -1), found, rounding, generator).movedim(-1, dim)
    else:
        rounded = _cast_scalar(wide, found, rounding, saturate, generator)
    return rounded.to(tensor.dtype)


def kernels_for(tensor: Tensor, fmt: Format | BlockFormat) -> Callable[..., Tensor] | None:
    """Return ``launch_cast`` if there are kernels for this tensor and format; None under torch.compile and vmap."""
    if tensor.device.type != "cuda" or type(tensor) not in (Tensor, Parameter):
        return None
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    launch = _launch()
    return None if launch is None or not launch.can_round(tensor, fmt) else launch.launch_cast


@cache
def _launch() -> Any:
    try:
        from ampwise.numbers.formats import cast_launch
    except ImportError:  # Triton is missing
        return None
    return cast_launch


def _refuse_what_has_no_values(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise UnsupportedTensor(f"cast() needs a tensor, got {type(tensor).__name__}. Convert it: torch.tensor(…).")
    if not tensor.is_floating_point():
        hint = "torch.view_as_real(tensor)" if tensor.is_complex() else "tensor.float()"
        raise UnsupportedTensor(f"cast() needs a floating-point tensor, got {tensor.dtype}. Convert it first: {hint}.")
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"cast() needs a dense tensor, got {tensor.layout}. Cast tensor.values().")
    if tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        raise UnsupportedTensor(f"cast() cannot unpack {tensor.dtype}, with two values per byte. Unpack it first.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Bit layout of a working dtype."""

    integer: torch.dtype
    mantissa_bits: int
    bias: int

    @property
    def magnitude_mask(self) -> int:
        return (1 << (63 if self.integer == torch.int64 else 31)) - 1

    @property
    def lowest_exponent(self) -> int:
        return 1 - self.bias

    @property
    def implicit_bit(self) -> int:
        return 1 << self.mantissa_bits


_LAYOUTS = {
    torch.float32: _Layout(integer=torch.int32, mantissa_bits=23, bias=127),
    torch.float64: _Layout(integer=torch.int64, mantissa_bits=52, bias=1023),
}


def _cast_scalar(
    wide: Tensor, fmt: Format, rounding: Rounding, saturate: bool, generator: torch.Generator | None
) -> Tensor:
    layout = _LAYOUTS[wide.dtype]
    # Compiled code may fuse a preceding product with these sums, and round only once.
    if can_round_by_adding(fmt, wide.dtype) and not torch.compiler.is_compiling():
        if rounding == "nearest":
            return _nearest(wide, layout, fmt, saturate)
        return _by_chance(wide, layout, fmt, saturate, generator)
    bits = wide.view(layout.integer)
    magnitude_bits = bits & layout.magnitude_mask
    finite = torch.isfinite(wide)
    # Infinities and NaN would overflow the integer arithmetic; they are restored below.
    rounded = _round_magnitude(magnitude_bits.where(finite, 0), layout, fmt, rounding, generator)
    rounded = rounded.view(wide.dtype)
    if not fmt.subnormals:
        rounded = rounded.clamp(min=fmt.smallest_normal)
    rounded = rounded.masked_fill(~finite, math.inf)
    rounded = rounded.masked_fill(rounded > fmt.max, overflow_value(fmt, saturate))
    rounded = rounded.masked_fill(torch.isnan(wide), math.nan)
    if not fmt.signed:
        # A scale has neither sign nor zero: negatives and zero become NaN, as in ml_dtypes.
        return rounded.masked_fill((bits < 0) | (magnitude_bits == 0), math.nan)
    signed = torch.where(bits < 0, -rounded, rounded)
    return signed + 0.0 if fmt.nan_at_negative_zero else signed  # -0.0 + 0.0 is +0.0


def can_round_by_adding(fmt: Format, dtype: torch.dtype) -> bool:
    """Return whether the format's values, and what ``_nearest`` adds to them, are normal numbers in this dtype."""
    layout = _LAYOUTS[dtype]
    highest = math.frexp(2 * fmt.max)[1] - 1 + layout.mantissa_bits - fmt.mantissa_bits
    lowest = fmt.lowest_exponent - fmt.mantissa_bits
    return fmt.signed and fmt.subnormals and layout.lowest_exponent <= lowest and highest <= layout.bias


def _nearest(wide: Tensor, layout: _Layout, fmt: Format, saturate: bool) -> Tensor:
    """Round by adding and subtracting a power of two whose last bit is the spacing of the format's values there.

    The processor rounds the sum, ties to even. In place where possible, as memory traffic dominates.
    """
    magnitude = wide.abs().clamp_max_(2 * fmt.max)  # clamp_ has no batching rule for vmap
    exponent = magnitude.view(layout.integer) & (layout.magnitude_mask ^ (layout.implicit_bit - 1))
    exponent.clamp_min_((fmt.lowest_exponent + layout.bias) << layout.mantissa_bits)
    adder = exponent.add_((layout.mantissa_bits - fmt.mantissa_bits) << layout.mantissa_bits).view(wide.dtype)
    rounded = magnitude.add_(adder).sub_(adder)
    limit = overflow_value(fmt, saturate)
    rounded = rounded.clamp_max_(limit) if limit == fmt.max else rounded.masked_fill_(rounded > fmt.max, limit)
    signed = rounded.copysign_(wide)
    return signed.add_(0.0) if fmt.nan_at_negative_zero else signed  # -0.0 + 0.0 is +0.0


def _by_chance(wide: Tensor, layout: _Layout, fmt: Format, saturate: bool, generator: torch.Generator | None) -> Tensor:
    """Round up with a probability of the distance to the value below, relative to the spacing there."""
    magnitude = wide.abs().clamp_max_(2 * fmt.max)  # clamp_ has no batching rule for vmap
    exponent = magnitude.view(layout.integer) & (layout.magnitude_mask ^ (layout.implicit_bit - 1))
    exponent.clamp_min_((fmt.lowest_exponent + layout.bias) << layout.mantissa_bits)
    spacing = exponent.sub_(fmt.mantissa_bits << layout.mantissa_bits).view(wide.dtype)
    steps = magnitude.div_(spacing)  # exact: a power of two
    below = steps.floor()
    # FP64, as FP32's random numbers are multiples of 2**-24: a share of 2**-40 would occur 2**16 times too often.
    random = torch.rand(wide.shape, dtype=torch.float64, device=wide.device, generator=generator)
    rounded = below.add_(random < steps.sub_(below)).mul_(spacing)
    limit = overflow_value(fmt, saturate)
    rounded = rounded.clamp_max_(limit) if limit == fmt.max else rounded.masked_fill_(rounded > fmt.max, limit)
    signed = rounded.copysign_(wide)
    return signed.add_(0.0) if fmt.nan_at_negative_zero else signed  # -0.0 + 0.0 is +0.0


def overflow_value(fmt: Format, saturate: bool) -> float:
    """Return what a value too large for ``fmt`` becomes."""
    if saturate or not (fmt.infinities or fmt.nans):
        return fmt.max
    return math.inf if fmt.infinities else math.nan


def _round_magnitude(
    bits: Tensor, layout: _Layout, fmt: Format, rounding: Rounding, generator: torch.Generator | None
) -> Tensor:
    """Round the bits of a magnitude to ``fmt``'s grid, ignoring the format's maximum.

    A value is ``significand * 2**(exponent - mantissa_bits)``; ``drop`` low bits of the significand are below the
    grid: more of them the further the value is below the format's smallest normal.
    """
    field = bits >> layout.mantissa_bits
    # Subnormals of the working dtype share the exponent of its smallest normal, without the implicit bit.
    exponent = field.clamp(min=1) - layout.bias
    significand = (bits & (layout.implicit_bit - 1)) + (field > 0).to(bits.dtype) * layout.implicit_bit
    drop = (fmt.lowest_exponent - exponent).clamp(min=0) + (layout.mantissa_bits - fmt.mantissa_bits)
    drop = drop.clamp(min=0)  # the working dtype is no wider than the format: nothing to round
    inside = drop.clamp(max=layout.mantissa_bits)
    unit = torch.ones_like(bits) << inside
    if rounding == "nearest":
        is_odd = (significand >> inside) & 1
        up = (unit >> 1) - 1 + is_odd
        below_grid = (drop == layout.mantissa_bits + 1) & (significand > layout.implicit_bit)
    else:
        high = 2**31 - 1 if unit.dtype == torch.int32 else 2**63 - 1
        random = torch.randint(0, high, unit.shape, dtype=unit.dtype, device=unit.device, generator=generator)
        up = random & (unit - 1)
        below_grid = _chance_below_grid(bits, layout, fmt, generator)
    # Adding may carry into the exponent, which correctly rounds up to the next power of two.
    on_grid = torch.where(inside > 0, (bits + up) & ~(unit - 1), bits)
    lowest_bits = _bits_of(fmt.smallest, layout)
    return torch.where(drop <= layout.mantissa_bits, on_grid, below_grid.to(bits.dtype) * lowest_bits)


def _chance_below_grid(bits: Tensor, layout: _Layout, fmt: Format, generator: torch.Generator | None) -> Tensor:
    """Return which values below the smallest round up to it, with a probability of magnitude / smallest."""
    wide = torch.float32 if layout.integer == torch.int32 else torch.float64
    _, exponent = math.frexp(fmt.smallest)
    # In two factors: 2**133 is beyond FP32's range, although the quotient is not.
    share = bits.view(wide) * 2.0 ** (-(exponent - 1) // 2) * 2.0 ** (-(exponent - 1) - (-(exponent - 1) // 2))
    # FP64, as FP32's random numbers are multiples of 2**-24: a share of 2**-40 would occur 2**16 times too often.
    return torch.rand(bits.shape, dtype=torch.float64, device=bits.device, generator=generator) < share


def _bits_of(power_of_two: float, layout: _Layout) -> int:
    """Return the bits of a power of two in the working dtype, also of a subnormal one."""
    _, exponent = math.frexp(power_of_two)
    field = exponent - 1 + layout.bias
    return field << layout.mantissa_bits if field > 0 else 1 << (layout.mantissa_bits + field - 1)


def _cast_blocks(wide: Tensor, fmt: BlockFormat, rounding: Rounding, generator: torch.Generator | None) -> Tensor:
    """Round block by block: choose each block's scale from its largest magnitude, and round the quotients.

    A non-finite value makes its whole block NaN, as there is no valid scale.
    """
    if wide.numel() == 0:
        return wide.clone()
    rows = wide.reshape(-1, wide.shape[-1] if wide.dim() else 1)
    padding = -rows.shape[1] % fmt.block_size
    padded = torch.nn.functional.pad(rows, (0, padding)) if padding else rows
    # Dividing by a power of two is exact; a quotient by NVFP4's scales needs FP64, or it would be rounded twice.
    blocks = padded.unflatten(1, (-1, fmt.block_size)).to(torch.float64 if fmt.tensor_scale else wide.dtype)
    lowest, highest = torch.aminmax(blocks, dim=-1, keepdim=True)
    largest = torch.maximum(-lowest, highest).double()
    scales = _block_scales(largest, fmt).to(blocks.dtype)
    if fmt.four_over_six:
        wider = _block_scales(largest, fmt, onto=FOUR).to(blocks.dtype)
        lost, lost_wider = (
            (_cast_scalar(blocks / each, fmt.element, "nearest", True, None) * each - blocks).square().sum(-1, True)
            for each in (scales, wider)
        )
        scales = torch.where(lost_wider < lost, wider, scales)
    elements = _cast_scalar(blocks / scales, fmt.element, rounding, True, generator)
    values = elements.mul_(scales.masked_fill(~scales.isfinite(), math.nan))
    return values.flatten(1)[:, : rows.shape[1]].reshape(wide.shape).to(wide.dtype)


def _block_scales(largest: Tensor, fmt: BlockFormat, onto: float | None = None) -> Tensor:
    """Return block scales from the blocks' largest magnitudes; NaN where a magnitude is not finite.

    onto: with a tensor scale, the element that the largest magnitude becomes; by default the format's largest.
    """
    finite = largest.masked_fill(~largest.isfinite(), 0.0)
    if fmt.tensor_scale:
        # NVFP4: an FP32 scale puts the largest block scale at the scale format's maximum; the block's own
        # scale is rounded to nearest.
        # To leave room for the scale that makes it a 4, which is 1.5 times as large, four-over-six stops at 256.
        most = ROOM_FOR_FOUR if fmt.four_over_six else fmt.scale.max
        whole = (finite.amax() / (fmt.element.max * most)).float().double()
        whole = torch.where(whole > 0, whole, 1.0).clamp(max=torch.finfo(torch.float32).max)
        rounded = _cast_scalar(finite / (onto or fmt.element.max) / whole, fmt.scale, "nearest", True, None)
        scales = torch.where(rounded > 0, rounded, fmt.scale.smallest) * whole
    else:
        # OCP MX: the power of two that puts the largest magnitude into the element's top binade.
        significand, exponent = torch.frexp(finite)
        most, top = math.frexp(fmt.element.max)
        if fmt.scales_up:
            exponent = exponent + (significand > most)
        lowest, highest = (math.frexp(end)[1] - 1 for end in (fmt.scale.smallest, fmt.scale.max))
        shared = torch.where(finite > 0, exponent - top, lowest).clamp(lowest, highest)
        scales = torch.ldexp(torch.ones_like(finite), shared)
    return scales.where(largest.isfinite(), math.nan)
