"""Tensors side by side in one piece of FP32 memory, so that rounding them takes a few launches and not a few each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Layout", "Wide", "layout_of", "local"]

ALIGNMENT = 64  # elements: every tensor begins where kernels read wide words


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each of several tensors lies."""

    shapes: tuple[tuple[torch.Size, tuple[int, ...]], ...]  # and strides
    offsets: tuple[int, ...]
    total: int  # elements
    device: torch.device


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """For tensors like these, all on one device; each keeps its order in memory."""
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
    shapes = tuple((tensor.shape, _strides(tensor)) for tensor in tensors)
    return Layout(shapes=shapes, offsets=tuple(offsets), total=total, device=tensors[0].device)


class Wide:
    """The memory, and the tensors in it."""

    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        self.flat = torch.empty(layout.total, dtype=dtype, device=layout.device)
        self.parts = [
            self.flat.as_strided(shape, strides, offset)
            for (shape, strides), offset in zip(layout.shapes, layout.offsets, strict=True)
        ]

    def read(self, tensors: Sequence[Tensor]) -> Wide:
        """Copy from tensors of any type."""
        torch._foreach_copy_(self.parts, [local(tensor) for tensor in tensors])
        return self

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy to tensors of any type."""
        torch._foreach_copy_([local(tensor) for tensor in tensors], self.parts)


def local(tensor: Any) -> Tensor:
    """What this process has of a tensor."""
    held: Tensor = tensor.detach()
    return held.to_local() if hasattr(held, "to_local") else held


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Its own, if it fills its memory: an optimizer's kernels want weights and state to lie alike."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
