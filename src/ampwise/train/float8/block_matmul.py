"""Matmuls of E4M3 matrices with a scale for each block, by cuBLAS or by ampwise's own kernel.

cuBLAS has them on Hopper, from CUDA 12.9 on, for sizes that are multiples of its tiles. ``multiply_blocks_reference``
defines the result, and is used without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampwise.train.float8.block_cast import BLOCK, spread_blocks
from ampwise.train.float8.fp8_cast import register_op

__all__ = ["block_matmul", "multiply_blocks", "multiply_blocks_reference"]

# cuBLAS wants rows of the scales of tiles to begin at multiples of 16 bytes: of four scales. torch does not say so.
BLAS_INNER = 4 * BLOCK


def block_matmul(
    a: Tensor,
    b: Tensor,
    of_a: Tensor,
    of_b: Tensor,
    dtype: torch.dtype,
    *,
    tiles: bool,
    blas: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``a @ b.T`` of E4M3 matrices, with their scales undone.

    of_a, of_b: the inverses of their scales, as in a BlockMatrix. The blocks of a are 1×128.
    tiles: whether those of b are 128×128.
    blas: whether cuBLAS may be used, where it takes the sizes.
    """
    # The kernels only add a 16-bit bias to a 16-bit result.
    within = bias is not None and dtype in (torch.bfloat16, torch.float16)
    inside = bias.to(dtype) if bias is not None and within else None
    # As in ``scaled_matmul``: torch.compile calls the matmul directly.
    known = torch.compiler.is_compiling() and a.device.type == "cuda"
    multiply = _multiply_compiled if known else multiply_blocks
    out: Tensor = multiply(a, b, of_a, of_b, inside, dtype, tiles, blas)
    return out if bias is None or within else out + bias.to(dtype)


def _multiply_compiled(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype, tiles: bool, blas: bool
) -> Tensor:
    if blas and _fits_blas(a, b):
        return _multiply_by_blas(a, b, of_a, of_b, bias, dtype, tiles)
    from ampwise.train.float8.block_kernel import multiply_by_kernel

    return multiply_by_kernel(a, b, of_a, of_b, bias, dtype, tiles, tuned=not blas)


def _multiply(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype, tiles: bool, blas: bool
) -> Tensor:
    if a.device.type != "cuda":
        return multiply_blocks_reference(a, b, of_a, of_b, bias, dtype, tiles)
    if blas and _fits_blas(a, b):
        return _multiply_by_blas(a, b, of_a, of_b, bias, dtype, tiles)
    from ampwise.train.float8.block_kernel import launch_multiply

    return launch_multiply(a, b, of_a, of_b, bias, dtype, tiles, tuned=not blas)


def _fits_blas(a: Tensor, b: Tensor) -> bool:
    return not (a.shape[0] % BLOCK or b.shape[0] % BLOCK or a.shape[1] % BLAS_INNER)


def _multiply_by_blas(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype, tiles: bool
) -> Tensor:
    of_other = of_b.t() if tiles else of_b
    # Fast sums, with fewer bits, are not available with blocks.
    return torch._scaled_mm(a, b.t(), of_a.t(), of_other, bias=bias, out_dtype=dtype, use_fast_accum=False)


multiply_blocks = register_op(
    "multiply_blocks(Tensor a, Tensor b, Tensor of_a, Tensor of_b, Tensor? bias, ScalarType dtype, bool tiles, bool "
    "blas) -> Tensor",
    _multiply,
    lambda a, b, of_a, of_b, bias, dtype, tiles, blas: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
)


def multiply_blocks_reference(
    a: Tensor,
    b: Tensor,
    of_a: Tensor,
    of_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiles: bool,
    wide: torch.dtype = torch.float32,
) -> Tensor:
    """Undo the scales, and multiply in a wide format; the definition of what the matmuls compute."""
    with torch.autocast(a.device.type, enabled=False):
        x = a.to(wide) * spread_blocks(of_a.t(), 1, BLOCK, a.shape)
        y = b.to(wide) * spread_blocks(of_b if tiles else of_b.t(), BLOCK if tiles else 1, BLOCK, b.shape)
        out = x @ y.t()
        return (out if bias is None else out + bias.to(wide)).to(dtype)
