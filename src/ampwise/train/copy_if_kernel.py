"""Copy many tensors in one launch, if a flag on the device is set.

``conditional_copy.ConditionalCopy`` defines it with ``torch.where``, which takes three launches for each tensor.
"""

# Constants of a Triton kernel are arguments in capitals.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ampwise.numbers.census.launch import address_table, launching_on

__all__ = ["copy_if_kernel", "launch_copy_if_"]

BLOCK = 1024  # words at a time: a layer has as many statistics as channels, some thousand at most
MOST_PARTS = 64  # programs that share a tensor: a buffer may be large
WARPS = 4


@triton.jit
def _copy(source, target, start, end, BLOCK: tl.constexpr):
    """Copy this program's blocks: every n-th block of the tensor, for n programs."""
    lanes = tl.arange(0, BLOCK)
    for first in range(start + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        inside = first + lanes < end
        tl.store(target + first + lanes, tl.load(source + first + lanes, mask=inside, other=0), mask=inside)


@triton.jit
def copy_if_kernel(table, found_inf, BLOCK: tl.constexpr):
    """Copy a part of one tensor. As integers: a NaN that passes through floats may lose its bits."""
    if tl.load(found_inf) != 0.0:
        row = table + 3 * tl.program_id(0)
        source, target, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        # Whole words where the addresses allow; the remaining bytes are those of an odd count of 16-bit numbers.
        words = tl.where((source | target) % 4 == 0, size // 4, 0)
        _copy(source.to(tl.pointer_type(tl.int32)), target.to(tl.pointer_type(tl.int32)), 0, words, BLOCK)
        _copy(source.to(tl.pointer_type(tl.int8)), target.to(tl.pointer_type(tl.int8)), 4 * words, size, BLOCK)


def launch_copy_if_(rows: tuple[int, ...], found_inf: Tensor) -> None:
    """Copy if the flag is not 0. ``rows`` has three numbers for each tensor: source address, target address, bytes."""
    table = address_table(rows, found_inf.device)
    parts = min(MOST_PARTS, 1 + max(rows[2::3]) // (4 * BLOCK))
    with launching_on(found_inf.device):
        copy_if_kernel[(len(rows) // 3, parts)](table, found_inf, BLOCK=BLOCK, num_warps=WARPS)
