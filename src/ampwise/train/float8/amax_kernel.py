"""The largest magnitude of a tensor in one read; torch.compile's reductions take several times as long.

``torch.linalg.vector_norm(x, torch.inf)`` defines it.
"""

# Constants of a Triton kernel are arguments in capitals.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["amax_kernel", "launch_amax"]

BLOCK = 4096  # values at a time: four 16-byte loads of BF16 for each thread
WARPS = 8
PROGRAMS = 132 * 8  # enough to fill a Hopper; each adds one atomic operation


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
    """Write the largest magnitude of contiguous values to ``target``, which holds 0; on the current device."""
    programs = min((x.numel() + BLOCK - 1) // BLOCK, PROGRAMS)
    if programs:
        amax_kernel[(programs,)](x, target, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
