"""The smallest and largest value of many tensors: measured where they are, read all at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["FINITE", "Ranges", "bytes_of", "has_memory", "local", "readable"]

FINITE = -1  # the slot of what cannot be anything else: whole numbers, nothing at all
PLAIN = (Tensor, Parameter)
AT_ONCE = 4096  # results that wait on a device before they are read

Kind = tuple[torch.device, torch.dtype]


class Ranges:
    """By slots: one for each tensor that was measured. A NaN anywhere makes NaN of both."""

    def __init__(self) -> None:
        self._read: list[tuple[float, float]] = []
        self._waiting: list[tuple[int, Tensor, Tensor]] = []

    def add(self, tensor: Tensor) -> int:
        """Measure a tensor; its slot. Nothing waits, but for each few thousand."""
        values = readable(tensor)
        if values is None:
            return FINITE
        low, high = torch.aminmax(values)
        slot = len(self._read)
        self._read.append((math.nan, math.nan))
        self._waiting.append((slot, low, high))
        if len(self._waiting) >= AT_ONCE:
            self.settle()
        return slot

    def settle(self) -> None:
        """Read what waits."""
        kinds: dict[Kind, list[tuple[int, Tensor, Tensor]]] = {}
        for entry in self._waiting:
            kinds.setdefault((entry[1].device, entry[1].dtype), []).append(entry)
        self._waiting = []
        for entries in kinds.values():
            lows = torch.stack([low for _, low, _ in entries]).double().tolist()
            highs = torch.stack([high for _, _, high in entries]).double().tolist()
            for (slot, _, _), low, high in zip(entries, lows, highs, strict=True):
                self._read[slot] = low, high

    def __getitem__(self, slot: int) -> tuple[float, float]:
        return (0.0, 0.0) if slot == FINITE else self._read[slot]

    def has_nan(self, slot: int) -> bool:
        return slot != FINITE and math.isnan(self._read[slot][0])

    def has_inf(self, slot: int) -> bool:
        """Infinities, and no NaN: that would hide them."""
        return slot != FINITE and any(map(math.isinf, self._read[slot]))

    def is_bad(self, slot: int) -> bool:
        return self.has_nan(slot) or self.has_inf(slot)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that is spread over several."""
    if type(tensor) in PLAIN:
        return tensor
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor


def bytes_of(tensor: Tensor) -> int:
    """What a tensor takes; of a sparse one, which torch does not say, its values."""
    return tensor._values().nbytes if tensor.layout == torch.sparse_coo else tensor.nbytes


def has_memory(tensor: Tensor) -> bool:
    """FSDP gives the memory of gathered weights back, and keeps the tensors: to read them would be the end."""
    return tensor.layout != torch.strided or tensor.untyped_storage().nbytes() > 0


def _is_plain(tensor: Tensor) -> bool:
    """Not one of a class that computes in its own way, whose results are of that class again."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def readable(tensor: Tensor) -> Tensor | None:
    """Its values in a form that can be compared; None where nothing can be other than finite."""
    tensor = local(tensor).detach()
    if tensor._is_zerotensor():  # zeros without memory, as second derivatives have them
        return None
    if tensor.is_sparse or tensor.layout != torch.strided:
        tensor = tensor.values() if tensor.layout != torch.sparse_coo else tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta or not _is_plain(tensor):
        return None
    if not has_memory(tensor):
        return None
    return tensor.float() if tensor.element_size() == 1 else tensor
