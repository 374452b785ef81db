"""From a matrix to FP8: scaled by a power of two, as it lies and transposed, in one read.

The scale is a power of two, so that scaling rounds nothing, and what is lost is what the format loses: the census of a
tensor, shifted, tells it. ``reference`` defines what the kernel must do, and does it where there is no GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ampwise.float8.operation import operation

__all__ = [
    "ALIGNMENT",
    "AMAX",
    "E4M3",
    "E5M2",
    "SATURATED",
    "Cast",
    "cast",
    "reference",
    "scales_of",
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMITS = {E4M3: 448.0, E5M2: 57344.0}
TOPS = {E4M3: 8, E5M2: 15}  # both limits are 1.75 · 2**top
ALIGNMENT = 16  # of the sizes of an FP8 product

AMAX, SATURATED = range(2)  # what a cast has seen: the largest magnitude, and how many values were cut off

MANTISSA_BITS, BIAS = 23, 127  # of FP32
MANTISSA_OF_1_75 = 0x600000
LARGEST_EXPONENT = 126  # so that a scale and its inverse are both normal numbers


Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # of a Cast, as operations return them


class Cast(NamedTuple):
    """A matrix in FP8."""

    rows: Tensor  # as it lies; nothing where it is not wanted
    columns: Tensor  # transposed, filled up with zeros to a multiple of 16; nothing where it is not wanted
    inverse: Tensor  # what to multiply by to undo the scale
    seen: Tensor  # AMAX, SATURATED, in FP32


def cast(x: Tensor, scale: Tensor | None, *, e5m2: bool, rows: bool, columns: bool) -> Cast:
    """A matrix in FP8, by a scale that is given, or by the one that follows from its largest magnitude.

    Values beyond the format's largest are cut off there. What is not finite becomes NaN; where no scale is given, all
    of it does, by way of the inverse.
    """
    if torch.compiler.is_compiling() and x.device.type == "cuda":
        from ampwise.float8.kernel import cast_by_kernels

        return Cast(*cast_by_kernels(x, scale, e5m2, rows, columns))
    return Cast(*cast_fp8(x, scale, e5m2, rows, columns))


def scales_of(amax: Tensor, top: int | Tensor, margin: int = 0) -> Tensor:
    """The largest powers of two that take magnitudes to no more than 1.75 · 2**(top - margin)."""
    bits = amax.contiguous().view(torch.int32)
    over = (bits & ((1 << MANTISSA_BITS) - 1)) > MANTISSA_OF_1_75
    exponents = top - margin - ((bits >> MANTISSA_BITS) - BIAS) - over.int()
    exponents = exponents.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return ((exponents + BIAS) << MANTISSA_BITS).to(torch.int32).view(torch.float32)


def _cast(x: Tensor, scale: Tensor | None, e5m2: bool, rows: bool, columns: bool) -> Parts:
    if x.device.type != "cuda":
        return reference(x, scale, e5m2, rows, columns)
    from ampwise.float8.kernel import launch_cast  # Triton, which only a GPU needs

    return launch_cast(x, scale, e5m2, rows, columns)


def _empty(x: Tensor, scale: Tensor | None, e5m2: bool, rows: bool, columns: bool) -> Parts:
    return empty(x, e5m2, rows, columns)


cast_fp8 = operation(
    "cast_fp8(Tensor x, Tensor? scale, bool e5m2, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)",
    _cast,
    _empty,
)


def empty(x: Tensor, e5m2: bool, rows: bool, columns: bool) -> Parts:
    """Room for the results."""
    height, width = x.shape
    dtype = E5M2 if e5m2 else E4M3
    return (
        x.new_empty((height, width) if rows else (0, 0), dtype=dtype),
        x.new_empty((width, filled(height)) if columns else (0, 0), dtype=dtype),
        x.new_empty(1, dtype=torch.float32),  # not a scalar, which torch.compile would fill with a launch of its own
        x.new_zeros(2, dtype=torch.float32),
    )


def filled(size: int) -> int:
    """Up to a multiple of 16."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def reference(x: Tensor, scale: Tensor | None, e5m2: bool, rows: bool, columns: bool) -> Parts:
    """The same by torch's operations."""
    dtype = E5M2 if e5m2 else E4M3
    limit = LIMITS[dtype]
    wide = x.float()
    finite = wide.isfinite()
    amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32) if x.numel() else wide.new_zeros(())
    used = scales_of(amax, TOPS[dtype]) if scale is None else scale
    scaled = wide * used
    values = torch.where(finite, scaled.clamp(-limit, limit), torch.nan).to(dtype)
    by_rows, by_columns, _, seen = empty(x, e5m2, rows, columns)
    if rows:
        by_rows = values
    if columns:
        by_columns = torch.zeros_like(by_columns.view(torch.uint8)).view(dtype)
        by_columns[:, : x.shape[0]] = values.t()
    seen[AMAX], seen[SATURATED] = amax, (finite & (scaled.abs() > limit)).sum()
    inverse = torch.where(amax.isfinite(), 1 / used, torch.nan) if scale is None else 1 / used
    return by_rows, by_columns, inverse.reshape(1), seen
