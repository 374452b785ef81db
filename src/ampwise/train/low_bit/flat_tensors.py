"""Several tensors in one block of FP32 memory, so that rounding all of them takes only a few launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["FlatLayout", "FlatTensors", "flat_layout", "local_tensor"]

ALIGNMENT = 64  # elements: every tensor starts aligned for vector loads


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Offsets, shapes and strides of tensors in one block of memory."""

    shapes: tuple[tuple[torch.Size, tuple[int, ...]], ...]  # shape and strides of each
    offsets: tuple[int, ...]
    total: int  # elements
    device: torch.device


def flat_layout(tensors: Sequence[Tensor]) -> FlatLayout:
    """Return the layout for tensors like these, all on one device; each keeps its memory format."""
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
    shapes = tuple((tensor.shape, _strides(tensor)) for tensor in tensors)
    return FlatLayout(shapes=shapes, offsets=tuple(offsets), total=total, device=tensors[0].device)


class FlatTensors:
    """A block of memory, and the tensors in it."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype = torch.float32) -> None:
        self.flat = torch.empty(layout.total, dtype=dtype, device=layout.device)
        self.parts = [
            self.flat.as_strided(shape, strides, offset)
            for (shape, strides), offset in zip(layout.shapes, layout.offsets, strict=True)
        ]

    def read(self, tensors: Sequence[Tensor]) -> FlatTensors:
        """Copy from tensors of any type."""
        torch._foreach_copy_(self.parts, [local_tensor(tensor) for tensor in tensors])
        return self

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy to tensors of any type."""
        torch._foreach_copy_([local_tensor(tensor) for tensor in tensors], self.parts)


def local_tensor(tensor: Any) -> Tensor:
    """Return the local part of a tensor."""
    held: Tensor = tensor.detach()
    return held.to_local() if hasattr(held, "to_local") else held


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor like this: optimizer kernels need weights and state in the same layout."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
