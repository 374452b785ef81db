"""View any tensor as contiguous floats, copied only if necessary; or raise a clear error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.errors import UnsupportedTensor

# The dtypes that the C extension and the kernel can read, and their codes there.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_PLAIN = (Tensor, torch.nn.Parameter)


def flat_values(tensor: Any, name: str | None = None) -> Tensor:
    """Return the tensor's values, contiguous, in any order and shape; for a DTensor, the local shard.

    It runs for each parameter at each step, hence the fast path for ordinary tensors.
    """
    what = "this" if name is None else repr(name)
    # Lazily negated tensors are fine: only magnitudes are counted.
    is_ordinary = (
        type(tensor) in _PLAIN
        and tensor.dtype in DTYPE_CODES
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and tensor.is_contiguous()
    )
    if is_ordinary:
        dense: Tensor = tensor
    else:
        _refuse_what_has_no_values(tensor, what)
        if hasattr(tensor, "to_local"):  # a DTensor's shard
            tensor = tensor.to_local()
        if hasattr(tensor, "trigger_wait"):  # the result of a collective
            tensor = tensor.trigger_wait()
        dense = _dense(tensor.detach())
    try:
        has_memory = dense.data_ptr() != 0 or dense.numel() == 0  # reading address 0 would crash the process
    except RuntimeError:  # inside vmap, torch.func.grad and other transforms
        has_memory = False
    if not has_memory:
        kind = "" if type(dense) in _PLAIN else f" ({type(dense).__name__})"
        raise UnsupportedTensor(
            f"{what} has a shape but no memory{kind}: freed, fake, wrapped, or inside a function transform. "
            "Count the tensor that holds the values."
        )
    return dense


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


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor's values contiguously; their order does not matter, so a transposed tensor is not copied."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:  # the values do not fill a contiguous range of memory
            return tensor.contiguous()
        expected *= size
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
