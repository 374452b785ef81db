"""Check the kernels of ``Fp8("block")`` on a device before a model is trained with them, and look for cuBLAS's."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ampwise.train.float8.block_cast import BlockMatrix, cast_blocks_reference, cast_to_strips, cast_to_tiles
from ampwise.train.float8.block_matmul import BLAS_INNER, block_matmul, multiply_blocks_reference

__all__ = ["blas_has_blocks", "wrong_block_results"]

HOPPER = 9  # compute capability; cuBLAS has these matmuls for no other
# Several blocks each way, of which the last are shorter; and sizes that cuBLAS takes.
ODD_SIZES, WHOLE_SIZES = (272, 400, 656), (256, 384, 2 * BLAS_INNER)
# Of a product, relative to the product of magnitudes: BF16 rounds by 2**-9, and tensor cores keep 14 bits of a sum. A
# scale at a wrong place gives more.
TOLERANCE = 2.0**-7
SUM_TOLERANCE = 2.0**-18  # of columns in FP32, in any order


@cache
def wrong_block_results(device: torch.device) -> str:
    """Return what ampwise's kernels compute otherwise than their reference; empty if nothing. Syncs with the device."""
    numbers = _uneven(ODD_SIZES[0], ODD_SIZES[2], device)
    for name, dtype, tiles in (
        ("an input", torch.bfloat16, False), ("a weight", torch.float32, True), ("a weight", torch.bfloat16, True),
    ):  # fmt: skip
        x = numbers.to(dtype)
        wanted = {"rows": True, "columns": True}
        *cast, sums = cast_to_tiles(x, **wanted) if tiles else cast_to_strips(x, **wanted, sums=True)
        for one, other in zip(cast, cast_blocks_reference(x, tiles, **wanted)[:4], strict=True):
            if not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
                return f"casts {name} in blocks"
        wide = x.double()
        if not tiles and not ((sums - wide.sum(0)).abs() <= SUM_TOLERANCE * wide.abs().sum(0)).all():
            return f"adds up {name}"
    # Of such sizes cuBLAS has none, so this is the kernel's.
    return "" if _multiplies_well(ODD_SIZES, device, blas=blas_has_blocks(device)) else "multiplies blocks"


@cache
def blas_has_blocks(device: torch.device) -> bool:
    """Return whether cuBLAS has right matmuls of matrices with a scale for each block. Syncs with the device."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    try:
        return _multiplies_well(WHOLE_SIZES, device, blas=True)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):  # of another version of CUDA or torch
        return False


@torch.no_grad()
def _multiplies_well(sizes: tuple[int, int, int], device: torch.device, *, blas: bool) -> bool:
    """Return whether a layer's matmuls are as in the reference: by tiles with a bias, and by strips into FP32."""
    height, width, inner = sizes
    a = cast_to_strips(_uneven(height, inner, device), rows=True, columns=False)
    wide = _uneven(width, inner, device, seed=1)
    bias = wide[:, 0].bfloat16()
    for tiles, dtype, added in (
        (True, torch.bfloat16, bias), (True, torch.bfloat16, None), (False, torch.float32, None),
        (False, torch.bfloat16, None),
    ):  # fmt: skip
        b = cast_to_tiles(wide, rows=True, columns=False) if tiles else cast_to_strips(wide, rows=True, columns=False)
        found = block_matmul(a.rows, b.rows, a.of_rows, b.of_rows, dtype, tiles=tiles, blas=blas, bias=added)
        expected, bound = (
            multiply_blocks_reference(x.rows, y.rows, x.of_rows, y.of_rows, z, torch.float64, tiles, torch.float64)
            for x, y, z in ((a, b, added), (_magnitudes(a), _magnitudes(b), None if added is None else added.abs()))
        )
        if not ((found.double() - expected).abs() <= TOLERANCE * bound).all():  # nor is NaN
            return False
    return True


def _magnitudes(matrix: BlockMatrix) -> BlockMatrix:
    return matrix._replace(rows=matrix.rows.float().abs().to(matrix.rows.dtype))


def _uneven(rows: int, columns: int, device: torch.device, seed: int = 0) -> Tensor:
    """Return numbers whose magnitudes differ between rows and between blocks of columns.

    From a generator of its own, so that the user's random numbers do not change.
    """
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    numbers *= torch.exp2(-(torch.arange(rows) % 7).float()).unsqueeze(1)
    numbers *= torch.exp2(((torch.arange(columns) // 64) % 5).float())
    return numbers.to(device)
