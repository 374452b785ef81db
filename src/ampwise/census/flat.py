"""Any tensor as one run of floats in memory, copied only if it must be; or a clear error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.errors import UnsupportedTensor

__all__ = ["KINDS", "flat_values"]

# What the C loop and the kernel can read, by the numbers they know it by.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_PLAIN = (Tensor, torch.nn.Parameter)


def flat_values(tensor: Any, name: str | None = None) -> Tensor:
    """The tensor's values, contiguous, in some order and shape; of a DTensor, the local shard.

    It runs once for each parameter at each step, hence the quick way out for what gradients usually are.
    """
    if _is_ordinary(tensor):
        dense: Tensor = tensor
    else:
        _refuse_what_has_no_values(tensor, _called(name))
        dense = _dense(_unwrapped(tensor))
    if _has_no_memory(dense):
        kind = "" if type(dense) in _PLAIN else f" ({type(dense).__name__})"
        raise UnsupportedTensor(
            f"{_called(name)} has a shape and no memory{kind}: freed, fake, wrapped, or inside a function transform. "
            "Count the tensor that holds the values."
        )
    return dense


def _called(name: str | None) -> str:
    return "this" if name is None else repr(name)


def _is_ordinary(tensor: Any) -> bool:
    # Lazily negated ones are welcome: only magnitudes are counted.
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in KINDS
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and tensor.is_contiguous()
    )


def _refuse_what_has_no_values(tensor: Any, what: str) -> None:
    if not isinstance(tensor, Tensor):
        hint = " Leave out parameters without a gradient." if tensor is None else ""
        raise UnsupportedTensor(f"census() counts tensors; {what} is {type(tensor).__name__}.{hint}")
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedTensor(f"{what} is not initialised yet. Run the model once first.")
    if not tensor.is_floating_point():
        hint = " Count torch.view_as_real(tensor)." if tensor.is_complex() else ""
        raise UnsupportedTensor(f"census() counts floating-point tensors; {what} is {tensor.dtype}.{hint}")
    if hasattr(tensor, "fake_mode"):
        raise UnsupportedTensor(
            f"{what} has a shape and no memory: a FakeTensor stands for a tensor that is not there."
        )
    if tensor.is_meta:
        raise UnsupportedTensor(f"{what} is on the meta device: it has a shape and no values. Materialise it first.")
    if tensor.is_nested:
        raise UnsupportedTensor(f"{what} is a nested tensor. Count tensor.values().")
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"{what} is {tensor.layout}, whose zeros are not stored. Count tensor.values().")
    if tensor.element_size() == 1 and "float8" not in str(tensor.dtype):
        raise UnsupportedTensor(f"{what} is {tensor.dtype}, which packs values into bytes. Unpack it first.")


def _has_no_memory(dense: Tensor) -> bool:
    """Reading address 0 would end the process, so it must not come that far."""
    try:
        return dense.data_ptr() == 0 and dense.numel() > 0
    except RuntimeError:  # inside vmap, torch.func.grad and the like
        return True


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that lies on this device: a DTensor's local shard, the result of a collective once it is there."""
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
    """Are the values, in some order, exactly a contiguous run of memory?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
