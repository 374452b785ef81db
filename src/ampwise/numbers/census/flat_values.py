"""View any tensor as contiguous floats, copied only if necessary; or raise a clear error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.errors import UnsupportedTensor

__all__ = ["DTYPE_CODES", "flat_values"]

# The dtypes that the C extension and the kernel can read, and their codes there.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_PLAIN = (Tensor, torch.nn.Parameter)


def flat_values(tensor: Any, name: str | None = None) -> Tensor:
    """Return the tensor's values, contiguous, in any order and shape; for a DTensor, the local shard.

    It runs for each parameter at each step, hence the fast path for ordinary tensors.
    """
    if _is_ordinary(tensor):
        dense: Tensor = tensor
    else:
        _refuse_what_has_no_values(tensor, _called(name))
        dense = _dense(_unwrapped(tensor))
    if _has_no_memory(dense):
        kind = "" if type(dense) in _PLAIN else f" ({type(dense).__name__})"
        raise UnsupportedTensor(
            f"{_called(name)} has a shape but no memory{kind}: freed, fake, wrapped, or inside a function transform. "
            "Count the tensor that holds the values."
        )
    return dense


def _called(name: str | None) -> str:
    return "this" if name is None else repr(name)


def _is_ordinary(tensor: Any) -> bool:
    # Lazily negated tensors are fine: only magnitudes are counted.
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in DTYPE_CODES
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and tensor.is_contiguous()
    )


def _refuse_what_has_no_values(tensor: Any, what: str) -> None:
    if not isinstance(tensor, Tensor):
        hint = " Skip parameters without a gradient." if tensor is None else ""
        raise UnsupportedTensor(f"census() needs tensors; {what} is {type(tensor).__name__}.{hint}")
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedTensor(f"{what} is not initialised yet. Run the model once first.")
    if not tensor.is_floating_point():
        hint = " Count torch.view_as_real(tensor)." if tensor.is_complex() else ""
        raise UnsupportedTensor(f"census() needs floating-point tensors; {what} is {tensor.dtype}.{hint}")
    if hasattr(tensor, "fake_mode"):
        raise UnsupportedTensor(f"{what} has a shape but no memory: it is a FakeTensor. Count the real tensor.")
    if tensor.is_meta:
        raise UnsupportedTensor(f"{what} is on the meta device: it has a shape but no values. Materialise it first.")
    if tensor.is_nested:
        raise UnsupportedTensor(f"{what} is a nested tensor. Count tensor.values().")
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"{what} is {tensor.layout}, whose zeros are not stored. Count tensor.values().")
    if tensor.element_size() == 1 and "float8" not in str(tensor.dtype):
        raise UnsupportedTensor(f"{what} is {tensor.dtype}, which packs values into bytes. Unpack it first.")


def _has_no_memory(dense: Tensor) -> bool:
    """Return whether the tensor has no memory: reading address 0 would crash the process."""
    try:
        return dense.data_ptr() == 0 and dense.numel() > 0
    except RuntimeError:  # inside vmap, torch.func.grad and other transforms
        return True


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the local tensor: a DTensor's shard, or the result of a finished collective."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()
    return tensor.detach()


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() or not _covers_its_memory(tensor):
        return tensor.contiguous()
    # The order of values does not matter, so a transposed or channels-last tensor need not be copied.
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _covers_its_memory(tensor: Tensor) -> bool:
    """Return whether the values, in some order, fill a contiguous range of memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
