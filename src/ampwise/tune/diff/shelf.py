"""The tensors of the first side, kept until the second has been held against them.

They are kept by reference, and copied only when something is about to write into their memory. Where they take more
than there is room for on their device, they go to the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampwise.trace.ranges import readable
from ampwise.trace.recorder import storage_id

__all__ = ["Shelf", "identity_of", "legible"]

Room = Callable[[], float]


class Shelf:
    """By key. room: the bytes of a device that may be taken, asked at each tensor that comes."""

    def __init__(self, room: Room) -> None:
        self._room = room
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
        """Whether there is room for it where it is."""
        taken = _bytes_on_device(tensor)
        return not taken or storage_id(tensor) in self._by_storage or self.on_device + taken <= self._room()

    def put(self, key: Any, tensor: Tensor) -> None:
        """Keep a tensor as it is now."""
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
        """Something is about to be written there: what is kept of that memory becomes a copy."""
        storage = storage_id(tensor)
        copies = {key: self._kept[key].clone() for key in self._by_storage.get(storage, ())}
        for key, copy in copies.items():
            self.drop(key)
            self.put(key, copy)

    def drop(self, key: Any) -> None:
        """It is no longer needed."""
        storage = storage_id(self._kept.pop(key))
        keys = self._by_storage.get(storage)
        if keys is None:  # a copy on the host
            return
        keys.discard(key)
        if not keys:
            del self._by_storage[storage]
            self.on_device -= self._bytes.pop(storage)


def _bytes_on_device(tensor: Tensor) -> int:
    """What it takes there; nothing on the host."""
    return 0 if tensor.device.type == "cpu" else tensor.untyped_storage().nbytes()


def legible(tensor: Tensor) -> Tensor | None:
    """The values of a tensor, apart from its graph; None of what has none to compare."""
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr):
        tensor = tensor.detach().to_dense()
    if tensor.is_floating_point() or tensor.is_complex():
        return readable(tensor)
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta and tensor.layout == torch.strided
    return tensor.detach() if is_plain and tensor.numel() else None


def identity_of(tensor: Tensor) -> object:
    """By which a tensor is known again in its storage, as long as that is kept and nothing is written there."""
    version = 0 if tensor.is_inference() else tensor._version  # those cannot be written to where gradients are taken
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version
