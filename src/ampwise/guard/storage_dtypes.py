"""Views of tensors under dtypes that the file format supports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.runs.tensor_files import CODES, INTEGER_BY_SIZE, refuse_unwritable

__all__ = [
    "as_stored",
    "dtype_from_name",
    "from_stored",
    "is_writable",
    "original_dtype_name",
    "stored_dtype_and_shape",
]


def as_stored(tensor: Tensor, name: str) -> Tensor:
    """Return a view that can be saved (a copy for conjugated or negated views); raise BadInput if there is none.

    Complex dtypes that the format lacks become pairs of real numbers; others become integers of the same size.
    """
    if hasattr(tensor, "_local_tensor"):  # a DTensor, which is saved in shards
        return tensor
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if tensor.is_quantized or wraps_others:
        kind = f"quantised ({tensor.dtype})" if tensor.is_quantized else f"a {type(tensor).__name__}"
        raise BadInput(f"Guard cannot save {name}: it is {kind}; only plain tensors can be saved.")
    plain = tensor if type(tensor) in (Tensor, Parameter) else tensor.detach().as_subclass(Tensor)
    if plain.is_conj() or plain.is_neg():
        plain = plain.detach().resolve_conj().resolve_neg()
    stored = plain if plain.dtype in CODES or plain.layout != torch.strided else _viewed(plain.detach())
    try:
        refuse_unwritable(name, stored)
    except UnsupportedTensor as error:
        raise BadInput(f"Guard cannot save {error}") from error
    return stored


def stored_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of the view that ``as_stored`` makes of a tensor."""
    if dtype in CODES:
        return dtype, shape
    if dtype.is_complex:
        return dtype.to_real(), (*shape, 2)
    return INTEGER_BY_SIZE[dtype.itemsize], shape


def _viewed(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(INTEGER_BY_SIZE[tensor.itemsize])


def from_stored(stored: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Undo ``as_stored``. dtype: the original one, or None if it was not changed."""
    if dtype is None:
        return stored
    return torch.view_as_complex(stored.contiguous()) if dtype.is_complex else stored.view(dtype)


def original_dtype_name(tensor: Tensor) -> str | None:
    """Return the name of a tensor's dtype if it is stored under another; else None."""
    return None if tensor.dtype in CODES else str(tensor.dtype).removeprefix("torch.")


def dtype_from_name(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise BadInput(f"the state has tensors of {str(name)[:40]!r}, which this torch does not have.")
    return found


def is_writable(tensor: Tensor) -> bool:
    """Whether values can be copied into the tensor: no two elements share memory."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return not any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
