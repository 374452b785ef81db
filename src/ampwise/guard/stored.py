"""Tensors as a file of tensors has them: the same memory under a dtype that the format knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.tensors_on_disk import CODES, WHOLE_NUMBERS, refuse_unwritable

__all__ = ["as_stored", "dtype_called", "form_of_stored", "from_stored", "is_writable", "name_if_viewed"]


def as_stored(tensor: Tensor, name: str) -> Tensor:
    """The same memory, or a copy of a conjugated or negated view; BadInput for what cannot be saved.

    Complex numbers that the format has not are pairs of real ones; other dtypes are whole numbers of as many bytes.
    """
    if hasattr(tensor, "_local_tensor"):  # a DTensor, which is saved in parts
        return tensor
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if tensor.is_quantized or wraps_others:
        kind = f"quantised ({tensor.dtype})" if tensor.is_quantized else f"a {type(tensor).__name__}"
        raise BadInput(f"Guard cannot save {name}: it is {kind}, and only plain values are saved.")
    plain = tensor if type(tensor) in (Tensor, Parameter) else tensor.detach().as_subclass(Tensor)
    if plain.is_conj() or plain.is_neg():
        plain = plain.detach().resolve_conj().resolve_neg()
    stored = plain if plain.dtype in CODES or plain.layout != torch.strided else _viewed(plain.detach())
    try:
        refuse_unwritable(name, stored)
    except UnsupportedTensor as error:
        raise BadInput(f"Guard cannot save {error}") from error
    return stored


def form_of_stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape that ``as_stored`` gives to a tensor of these."""
    if dtype in CODES:
        return dtype, shape
    if dtype.is_complex:
        return dtype.to_real(), (*shape, 2)
    return WHOLE_NUMBERS[dtype.itemsize], shape


def _viewed(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(WHOLE_NUMBERS[tensor.itemsize])


def from_stored(stored: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The way back; None: it is as it was."""
    if dtype is None:
        return stored
    return torch.view_as_complex(stored.contiguous()) if dtype.is_complex else stored.view(dtype)


def name_if_viewed(tensor: Tensor) -> str | None:
    """The dtype of a tensor that is stored under another."""
    return None if tensor.dtype in CODES else str(tensor.dtype).removeprefix("torch.")


def dtype_called(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise BadInput(f"the state has tensors of {str(name)[:40]!r}, which this torch does not know.")
    return found


def is_writable(tensor: Tensor) -> bool:
    """Whether values can be written into its memory as they are: each has a place of its own."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return not any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
