"""Any tensor as a flat run of floats in memory, copied only if it must be; or a clear error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.errors import UnsupportedTensor

__all__ = ["flat_values"]


def flat_values(tensor: Any, name: str | None = None) -> Tensor:
    """The tensor's values in some order, one-dimensional and contiguous; of a DTensor, the local shard."""
    what = "this" if name is None else repr(name)
    if not isinstance(tensor, Tensor):
        hint = " Leave out parameters without a gradient." if tensor is None else ""
        raise UnsupportedTensor(f"census() counts tensors; {what} is {type(tensor).__name__}.{hint}")
    if not tensor.is_floating_point():
        hint = " Count torch.view_as_real(tensor)." if tensor.is_complex() else ""
        raise UnsupportedTensor(f"census() counts floating-point tensors; {what} is {tensor.dtype}.{hint}")
    if tensor.is_meta:
        raise UnsupportedTensor(f"{what} is on the meta device: it has a shape and no values. Materialise it first.")
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"{what} is {tensor.layout}, whose zeros are not stored. Count tensor.values().")
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    plain = local.detach().resolve_neg()
    if plain.is_contiguous():
        return plain.view(-1)
    if _covers_its_memory(plain):
        # The order of values does not matter, so a transposed or channels-last tensor need not be copied.
        return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
    return plain.contiguous().view(-1)


def _covers_its_memory(tensor: Tensor) -> bool:
    """Are the values, in some order, exactly a contiguous run of memory?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
