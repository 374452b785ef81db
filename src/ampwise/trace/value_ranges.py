"""Measure the smallest and largest value of many tensors on their devices, and read the results in batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["ALWAYS_FINITE", "ValueRanges", "bytes_of", "has_storage", "local_shard", "readable_values", "version_of"]

ALWAYS_FINITE = -1  # the slot of tensors that are always finite: integers, empty tensors
PLAIN = (Tensor, Parameter)
BATCH_SIZE = 4096  # results to collect on a device before they are read


class ValueRanges:
    """Smallest and largest values, in one slot per measured tensor. If the tensor has a NaN, both are NaN."""

    def __init__(self) -> None:
        self._read: list[tuple[float, float]] = []
        self._pending: list[tuple[int, Tensor, Tensor]] = []

    def add(self, tensor: Tensor) -> int:
        """Measure a tensor and return its slot. Syncs with the device only every few thousand calls."""
        values = readable_values(tensor)
        if values is None:
            return ALWAYS_FINITE
        low, high = torch.aminmax(values)
        slot = len(self._read)
        self._read.append((math.nan, math.nan))
        self._pending.append((slot, low, high))
        if len(self._pending) >= BATCH_SIZE:
            self.settle()
        return slot

    def settle(self) -> None:
        """Read all pending results."""
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, Tensor]]] = {}
        for entry in self._pending:
            kinds.setdefault((entry[1].device, entry[1].dtype), []).append(entry)
        self._pending = []
        for entries in kinds.values():
            lows = torch.stack([low for _, low, _ in entries]).double().tolist()
            highs = torch.stack([high for _, _, high in entries]).double().tolist()
            for (slot, _, _), low, high in zip(entries, lows, highs, strict=True):
                self._read[slot] = low, high

    def __getitem__(self, slot: int) -> tuple[float, float]:
        return (0.0, 0.0) if slot == ALWAYS_FINITE else self._read[slot]

    def bad(self, slot: int) -> str:
        """Return what is bad in a tensor: "nan", "inf" (without NaN, which would hide infinities), or ""."""
        low, high = self[slot]
        return "nan" if math.isnan(low) else "inf" if math.isinf(low) or math.isinf(high) else ""


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor; any other tensor itself."""
    if type(tensor) in PLAIN:
        return tensor
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; for a sparse one, whose ``nbytes`` torch does not have, those of its values."""
    return tensor._values().nbytes if tensor.layout == torch.sparse_coo else tensor.nbytes


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor's storage is allocated: FSDP frees that of gathered weights, and reading them crashes."""
    return tensor.layout != torch.strided or tensor.untyped_storage().nbytes() > 0


def readable_values(tensor: Tensor) -> Tensor | None:
    """Return the values in a form that can be compared; None if they are always finite or cannot be read."""
    tensor = local_shard(tensor).detach()
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # in vmap, or a derivative by torch.func
        return None
    if tensor._is_zerotensor():  # zeros without storage, as in second derivatives
        return None
    if tensor.is_sparse or tensor.layout != torch.strided:
        tensor = tensor.values() if tensor.layout != torch.sparse_coo else tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    has_own_dispatch = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta or has_own_dispatch:
        return None
    if not has_storage(tensor):
        return None
    return tensor.float() if tensor.element_size() == 1 else tensor


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
