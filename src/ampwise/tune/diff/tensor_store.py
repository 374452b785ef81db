"""Keep the first side's tensors until the second side's are compared with them.

They are kept by reference, and copied only before something writes into their memory. Those that exceed the memory
budget of their device are moved to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampwise.trace.recorder import storage_id
from ampwise.trace.value_ranges import readable_values

__all__ = ["TensorStore", "comparable_values", "view_identity"]

Budget = Callable[[], float]


class TensorStore:
    """Kept tensors by key. ``budget`` returns the bytes of the device that may be used; called for each tensor."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._kept: dict[Any, Tensor] = {}
        self._by_storage: dict[int, set[Any]] = {}
        self._bytes: dict[int, int] = {}  # by storage
        self.on_device = 0  # bytes
        self.moved = 0  # bytes that went to the host

    def __contains__(self, key: Any) -> bool:
        return key in self._kept

    def __getitem__(self, key: Any) -> Tensor:
        return self._kept[key]

    def fits(self, tensor: Tensor) -> bool:
        """Whether the budget allows keeping it on its device."""
        taken = _bytes_on_device(tensor)
        return not taken or storage_id(tensor) in self._by_storage or self.on_device + taken <= self._budget()

    def put(self, key: Any, tensor: Tensor) -> None:
        """Keep a tensor with its current values."""
        storage = storage_id(tensor)
        if not self.fits(tensor):
            self._kept[key] = tensor.to("cpu", copy=True)
            self.moved += tensor.nbytes
            return
        if storage not in self._by_storage:
            self._bytes[storage] = _bytes_on_device(tensor)
            self.on_device += self._bytes[storage]
        self._kept[key] = tensor
        self._by_storage.setdefault(storage, set()).add(key)

    def before_write(self, tensor: Tensor) -> None:
        """Copy the kept tensors that share this tensor's memory, before it is written."""
        storage = storage_id(tensor)
        copies = {key: self._kept[key].clone() for key in self._by_storage.get(storage, ())}
        for key, copy in copies.items():
            self.drop(key)
            self.put(key, copy)

    def drop(self, key: Any) -> None:
        """Remove a tensor."""
        storage = storage_id(self._kept.pop(key))
        keys = self._by_storage.get(storage)
        if keys is None:  # a copy on the host
            return
        keys.discard(key)
        if not keys:
            del self._by_storage[storage]
            self.on_device -= self._bytes.pop(storage)


def _bytes_on_device(tensor: Tensor) -> int:
    """Return its bytes on the device; 0 on the host."""
    return 0 if tensor.device.type == "cpu" else tensor.untyped_storage().nbytes()


def comparable_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values, detached; None if it has none to compare."""
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr):
        tensor = tensor.detach().to_dense()
    if tensor.is_floating_point() or tensor.is_complex():
        return readable_values(tensor)
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta and tensor.layout == torch.strided
    return tensor.detach() if is_plain and tensor.numel() else None


def view_identity(tensor: Tensor) -> object:
    """Return what identifies a tensor within its storage, while that is kept and not written."""
    version = 0 if tensor.is_inference() else tensor._version  # inference tensors are never written here
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version
