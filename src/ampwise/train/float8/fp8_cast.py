"""Cast a matrix to FP8, scaled by a power of two, row-major and transposed, in one read.

The scale is a power of two, so that scaling itself rounds nothing, and the loss can be computed from the tensor's
census, shifted by the scale. ``cast_reference`` defines what the kernel must do, and is used without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "AMAX",
    "E4M3",
    "E5M2",
    "SATURATED",
    "Fp8Matrix",
    "cast_reference",
    "cast_to_fp8",
    "recast_fp8_",
    "register_op",
    "scales_of",
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMITS = {E4M3: 448.0, E5M2: 57344.0}
TOPS = {E4M3: 8, E5M2: 15}  # both limits are 1.75 · 2**top
ALIGNMENT = 16  # sizes of an FP8 matmul must be multiples of this

AMAX, SATURATED = range(2)  # statistics of a cast: the largest magnitude, and how many values were saturated

MANTISSA_BITS, BIAS = 23, 127  # of FP32
MANTISSA_OF_1_75 = 0x600000
LARGEST_EXPONENT = 126  # so that a scale and its inverse are both normal numbers

CastTensors = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor
]  # the fields of an Fp8Matrix, as torch operators return them


class Fp8Matrix(NamedTuple):
    """A matrix in FP8."""

    rows: Tensor  # row-major; empty if not requested
    columns: Tensor  # transposed, padded with zeros to a multiple of 16; empty if not requested
    inverse: Tensor  # what to multiply by to undo the scale
    seen: Tensor  # AMAX, SATURATED, in FP32
    sums: Tensor  # of the columns as they were, in FP32; empty if not requested


def cast_to_fp8(
    x: Tensor, scale: Tensor | None, *, e5m2: bool, rows: bool, columns: bool, sums: bool = False
) -> Fp8Matrix:
    """Cast a matrix to FP8 with the given scale, or with the one for its largest magnitude.

    Values beyond the format's maximum saturate. Inf and NaN become NaN; without a given scale, all values then do, and
    the inverse. The sums of the columns are a bias's gradient, which so needs no read of its own.
    """
    if torch.compiler.is_compiling() and x.device.type == "cuda":
        from ampwise.train.float8.kernel import cast_by_kernels

        return Fp8Matrix(*cast_by_kernels(x, scale, e5m2, rows, columns, sums))
    return Fp8Matrix(*cast_fp8(x, scale, e5m2, rows, columns, sums))


def recast_fp8_(x: Tensor, matrix: Fp8Matrix) -> None:
    """Cast a matrix to E4M3 by its largest magnitude again, into the tensors of a cast without sums."""
    rows, columns = bool(matrix.rows.numel()), bool(matrix.columns.numel())
    if x.device.type == "cuda":
        from ampwise.train.float8.kernel import launch_cast

        launch_cast(x, None, False, rows, columns, False, matrix)
    else:
        for old, new in zip(matrix, cast_reference(x, None, False, rows, columns), strict=True):
            old.copy_(new)


def scales_of(amax: Tensor, top: int | Tensor, margin: int = 0) -> Tensor:
    """Return the largest powers of two that scale magnitudes to at most 1.75 · 2**(top - margin)."""
    bits = amax.contiguous().view(torch.int32)
    over = (bits & ((1 << MANTISSA_BITS) - 1)) > MANTISSA_OF_1_75
    exponents = top - margin - ((bits >> MANTISSA_BITS) - BIAS) - over.int()
    exponents = exponents.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return ((exponents + BIAS) << MANTISSA_BITS).to(torch.int32).view(torch.float32)


def _cast(x: Tensor, scale: Tensor | None, e5m2: bool, rows: bool, columns: bool, sums: bool) -> CastTensors:
    if x.device.type != "cuda":
        return cast_reference(x, scale, e5m2, rows, columns, sums)
    from ampwise.train.float8.kernel import launch_cast  # Triton, which only a GPU needs

    return launch_cast(x, scale, e5m2, rows, columns, sums)


def register_op(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register a custom operator, which torch.compile does not look into, and return it.

    ``fake`` returns empty tensors like the function's results.

    Uses torch's older interface: ``torch.library.custom_op`` checks all arguments and results in each call, which takes
    several times as long, and a step of a large model has hundreds of calls. The operators must not change or return
    their arguments, and have no derivative: they are called where autograd is off.
    """
    name = schema.partition("(")[0]
    torch.library.define(f"ampwise::{name}", schema.removeprefix(name))
    torch.library.impl(f"ampwise::{name}", ("CPU", "CUDA"), function)
    torch.library.register_fake(f"ampwise::{name}", fake)
    found: Callable[..., Any] = getattr(torch.ops.ampwise, name).default
    return found


cast_fp8 = register_op(
    "cast_fp8(Tensor x, Tensor? scale, bool e5m2, bool rows, bool columns, bool sums)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cast,
    lambda x, scale, *how: empty_cast(x, *how),
)


def empty_cast(x: Tensor, e5m2: bool, rows: bool, columns: bool, sums: bool) -> CastTensors:
    """Return empty tensors for the results."""
    height, width = x.shape
    dtype = E5M2 if e5m2 else E4M3
    return (
        x.new_empty((height, width) if rows else (0, 0), dtype=dtype),
        x.new_empty((width, padded_size(height)) if columns else (0, 0), dtype=dtype),
        x.new_empty(1, dtype=torch.float32),  # not 0-dim: torch.compile would fill that in a separate launch
        x.new_zeros(2, dtype=torch.float32),
        x.new_empty(width if sums else 0, dtype=torch.float32),
    )


def padded_size(size: int) -> int:
    """Round a size up to a multiple of 16."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def cast_reference(
    x: Tensor, scale: Tensor | None, e5m2: bool, rows: bool, columns: bool, sums: bool = False
) -> CastTensors:
    """Cast with torch operations; the definition of what the kernel computes."""
    dtype = E5M2 if e5m2 else E4M3
    limit = LIMITS[dtype]
    wide = x.float()
    finite = wide.isfinite()
    amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32) if x.numel() else wide.new_zeros(())
    used = torch.where(amax.isfinite(), scales_of(amax, TOPS[dtype]), torch.nan) if scale is None else scale
    scaled = wide * used
    values = torch.where(finite & ~scaled.isnan(), scaled.clamp(-limit, limit), torch.nan).to(dtype)
    by_rows, by_columns, _, seen, by_sums = empty_cast(x, e5m2, rows, columns, sums)
    if rows:
        by_rows = values
    if columns:
        by_columns = torch.zeros_like(by_columns.view(torch.uint8)).view(dtype)
        by_columns[:, : x.shape[0]] = values.t()
    seen[AMAX], seen[SATURATED] = amax, (finite & (scaled.abs() > limit)).sum()
    return by_rows, by_columns, (1 / used).reshape(1), seen, wide.sum(0) if sums else by_sums
