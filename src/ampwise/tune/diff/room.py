"""How much may be kept on a device: as much as takes a plain step of the first side to its peak, and a quarter more.

The peak is looked at while the first side runs, at each operation that makes something large. Nothing is reset: the
counts of the allocator are the user's. Where there is no such count, what a backward pass saves stands for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.trace.recorder import tensors_in

__all__ = ["LEAST", "Room"]

MORE = 1.25  # of a plain step's peak; 1.3 is what is promised, and an estimate misses something
LEAST = 2**26  # bytes: below that nobody counts


class Room:
    """On the device of the first side, from before its first run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._before = self._taken()
        self._own = 0  # bytes that the first side takes at its peak, beyond those that were there

    def forward(self, saved: int) -> float:
        """Bytes for what is kept of a forward pass alone; saved: what the pass would have saved so far."""
        return MORE * (self._before + saved) - self._before + LEAST

    def beside(self, share: float, gradients: int) -> float:
        """Bytes for what is kept while the other side goes forward and back.

        share: what that takes of what the first side does; gradients: bytes of the first side's, of weights.
        """
        peak = MORE * (self._before + self._own)
        return max(LEAST, peak - self._before - gradients - share * self._own)

    def saved(self, saved: int) -> None:
        """The first side saves so many bytes for its backward pass."""
        self._own = max(self._own, saved)

    def made(self, result: Any, kept: int) -> None:
        """An operation has given this, while so many bytes are kept."""
        if self._device is not None and any(each.nbytes >= LEAST for each in _tensors(result)):
            self._own = max(self._own, self._taken() - self._before - kept)

    def _taken(self) -> int:
        if self._device is None:
            return 0
        # The public function for this one number takes five times as long.
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(counts["allocated_bytes"]["all"]["current"]) if counts else 0


def _tensors(result: Any) -> list[Tensor]:
    found = tensors_in(result if isinstance(result, list | tuple) else (result,))
    return [each for each in found if each.layout == torch.strided]
