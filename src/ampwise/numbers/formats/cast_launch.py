"""Launch the kernels that round a tensor to a format."""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ampwise.numbers.census.launch import launching_on
from ampwise.numbers.formats import cast_kernel
from ampwise.numbers.formats.cast import can_round_by_adding, overflow_value
from ampwise.numbers.formats.format import BlockFormat, Format

BLOCK = 1024  # values for each program: eight for each thread
TILE = 2048  # values for each program, for block formats
MOST_COLUMNS = 128
WARPS = 4
FP32_LOWEST, FP32_HIGHEST, FP32_MANTISSA = -126, 127, 23
READ = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """A scalar format as constants of the kernels, by their names there."""

    MANTISSA: int
    LOWEST: int
    CEILING: int  # bits of a magnitude beyond the maximum that is still safe to compute with
    MAX: float
    MAX_BITS: int

    @property
    def wide(self) -> bool:
        """Whether the format has FP32's exponent range."""
        return self.LOWEST == FP32_LOWEST


def can_round(tensor: Tensor, fmt: Format | BlockFormat) -> bool:
    """Return whether the kernels support this format and the tensor's dtype."""
    return tensor.dtype in READ and (_grid(fmt) if isinstance(fmt, Format) else _blocks(fmt)) is not None


def launch_cast(
    tensor: Tensor,
    fmt: Format | BlockFormat,
    *,
    dim: int = -1,
    stochastic: bool = False,
    saturate: bool = False,
    scaled: bool = False,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a tensor's values rounded to a format that ``can_round``, in ``dtype`` or the tensor's own dtype.

    ``scaled``: scale the largest magnitude to the maximum of a scalar format, round, and scale back; saturates.
    """
    tensor = tensor.detach().resolve_neg()
    # With its dimensions in memory order; copied only if it is not dense.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    source = tensor.permute(order)
    if not source.is_contiguous():
        source, order = tensor.contiguous(), list(range(tensor.dim()))
    target = torch.empty_like(source, dtype=dtype or tensor.dtype)
    if tensor.numel():
        seed = None
        if stochastic:  # drawn on the device, so that a CUDA graph draws a new one in each replay
            seed = torch.randint(2**62, (1,), dtype=torch.int64, device=source.device, generator=generator)
        with launching_on(tensor.device):
            if isinstance(fmt, BlockFormat):
                place = order.index(range(tensor.dim())[dim]) if tensor.dim() else 0  # or an IndexError
                _launch_blocks(source, target, fmt, place, seed)
            else:
                _launch_scalar(source, target, fmt, seed, saturate or scaled, scaled)
    back = [order.index(place) for place in range(len(order))]
    return target.permute(back)


def _launch_scalar(
    source: Tensor, target: Tensor, fmt: Format, seed: Tensor | None, saturate: bool, scaled: bool
) -> None:
    grid = _grid(fmt)
    assert grid is not None
    largest = torch.linalg.vector_norm(source, math.inf) if scaled else None
    cast_kernel.scalar_kernel[(triton.cdiv(source.numel(), BLOCK),)](
        _words(source), _words(target), source.numel(),
        source if largest is None else largest.float(), source if seed is None else seed,
        **asdict(grid), WIDE=grid.wide, BEYOND=_bits(overflow_value(fmt, saturate)),
        SIGNED_ZERO=not fmt.nan_at_negative_zero,
        SCALED=scaled, STOCHASTIC=seed is not None, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_blocks(source: Tensor, target: Tensor, fmt: BlockFormat, dim: int, seed: Tensor | None) -> None:
    constants = _blocks(fmt)
    assert constants is not None
    length = source.shape[dim] if source.dim() else 1
    inner = math.prod(source.shape[dim + 1 :])
    lines, size = source.numel() // (length * inner), fmt.block_size
    if inner == 1 and length % size == 0:  # no shorter blocks, so treat it as one line
        lines, length = 1, source.numel()
    blocks = math.ceil(length / size)
    if inner == 1:
        others = TILE // size
        across = min(others, triton.next_power_of_2(blocks))
        programs = math.ceil(lines / (others // across)) * math.ceil(blocks / across)
    else:
        others, across = min(MOST_COLUMNS, triton.next_power_of_2(inner)), 1
        programs = lines * blocks * math.ceil(inner / others)
    tiles = {
        "SIZE": size, "OTHERS": others, "ACROSS": across, "AXIS": int(inner == 1),
        "num_warps": WARPS, "enable_fp_fusion": False,
    }  # fmt: skip
    of_blocks = largest = source
    if fmt.tensor_scale:
        of_blocks = source.new_empty(programs * others)
        largest = torch.zeros(1, dtype=torch.int32, device=source.device)
        cast_kernel.largest_kernel[(programs,)](
            _words(source), _words(of_blocks), largest, lines, length, inner, **tiles
        )
    cast_kernel.block_kernel[(programs,)](
        _words(source), _words(target), lines, length, inner, _words(of_blocks), largest,
        source if seed is None else seed, **constants, STOCHASTIC=seed is not None, **tiles,
    )  # fmt: skip


def _words(tensor: Tensor) -> Tensor:
    """Return BF16 as int16 for Triton's interpreter, which would truncate when it casts to BF16."""
    is_bf16 = tensor.dtype == torch.bfloat16
    return tensor.view(torch.int16) if is_bf16 and tensor.device.type == "cpu" else tensor


@lru_cache(maxsize=64)
def _grid(fmt: Format) -> _Grid | None:
    """Return the kernel constants of a format; None if it cannot be rounded in FP32."""
    same_exponents = (fmt.lowest_exponent, math.frexp(fmt.max)[1] - 1) == (FP32_LOWEST, FP32_HIGHEST)
    only_drops_bits = same_exponents and fmt.mantissa_bits < FP32_MANTISSA and fmt.signed and fmt.subnormals
    if not only_drops_bits and not can_round_by_adding(fmt, torch.float32):
        return None
    return _Grid(
        MANTISSA=fmt.mantissa_bits,
        LOWEST=fmt.lowest_exponent,
        CEILING=_bits(math.inf if same_exponents else 2 * fmt.max),
        MAX=fmt.max,
        MAX_BITS=_bits(fmt.max),
    )


@lru_cache(maxsize=64)
def _blocks(fmt: BlockFormat) -> dict[str, Any] | None:
    grid, top = _grid(fmt.element), math.frexp(fmt.element.max)[1] - 1
    scale = _grid(fmt.scale) if fmt.tensor_scale else None
    powers = (fmt.scale.smallest, fmt.scale.max) == (2.0**-127, 2.0**127) and top >= 2
    few_bits = scale is not None and scale.MANTISSA + fmt.element.mantissa_bits <= 6
    if grid is None or grid.wide or not (few_bits or powers) or fmt.block_size & (fmt.block_size - 1):
        return None
    if fmt.four_over_six:  # two casts of each block, of which the kernel does one
        return None
    return {
        **asdict(grid), "TOP": top, "SCALES_UP": fmt.scales_up, "TENSOR_SCALE": fmt.tensor_scale,
        "SCALE_MANTISSA": scale.MANTISSA if scale else 0, "SCALE_LOWEST": scale.LOWEST if scale else 0,
        "SCALE_SMALLEST": fmt.scale.smallest, "SCALE_MAX": fmt.scale.max,
    }  # fmt: skip


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
