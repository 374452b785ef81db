"""Any tensor as one run of floats in memory, copied only if it must be; or a clear error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.errors import UnsupportedTensor

__all__ = ["flat_values"]

_PLAIN = (Tensor, torch.nn.Parameter)
# Lazily negated ones are welcome: only magnitudes are counted.
_USUAL = (torch.float32, torch.bfloat16, torch.float16)


def flat_values(tensor: Any, name: str | None = None) -> Tensor:
    """The tensor's values, contiguous, in some order and shape; of a DTensor, the local shard.

    It runs once for each parameter at each step, hence the quick way out for what gradients usually are.
    """
    if type(tensor) in _PLAIN and tensor.dtype in _USUAL and tensor.is_contiguous() and not tensor.is_meta:
        return tensor  # type: ignore[no-any-return]
    _refuse_what_has_no_values(tensor, "this" if name is None else repr(name))
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    plain = local.detach()
    if plain.is_contiguous() or not _covers_its_memory(plain):
        return plain.contiguous()  # type: ignore[no-any-return]
    # The order of values does not matter, so a transposed or channels-last tensor need not be copied.
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())  # type: ignore[no-any-return]


def _refuse_what_has_no_values(tensor: Any, what: str) -> None:
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
    if tensor.element_size() == 1 and "float8" not in str(tensor.dtype):
        raise UnsupportedTensor(f"{what} is {tensor.dtype}, which packs values into bytes. Unpack it first.")


def _covers_its_memory(tensor: Tensor) -> bool:
    """Are the values, in some order, exactly a contiguous run of memory?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
