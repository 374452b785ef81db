"""How many bytes may be kept on a device: so many that the peak exceeds that of a plain step by at most a quarter.

The peak is read while the first side runs, at each operation with a large result. The allocator's statistics are not
reset, as the user may rely on them. Without such statistics, the bytes saved for the backward pass are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.trace.recorder import tensors_in

__all__ = ["LEAST", "MemoryBudget"]

MORE = 1.25  # of a plain step's peak; the promise is 1.3, as an estimate misses something
LEAST = 2**26  # bytes that do not count


class MemoryBudget:
    """Memory budget on the first side's device; create it before the first run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._before = self._taken()
        self._own = 0  # bytes that the first side takes at its peak, beyond those allocated before

    def forward(self, saved: int) -> float:
        """Return the bytes that may be kept of a forward pass; ``saved`` is what the pass would have saved so far."""
        return MORE * (self._before + saved) - self._before + LEAST

    def beside(self, share: float, gradients: int) -> float:
        """Return the bytes that may be kept while the other side runs forward and backward.

        ``share``: the other side's memory relative to the first's; ``gradients``: bytes of its weight gradients.
        """
        peak = MORE * (self._before + self._own)
        return max(LEAST, peak - self._before - gradients - share * self._own)

    def saved(self, saved: int) -> None:
        """Note how many bytes the first side saves for its backward pass."""
        self._own = max(self._own, saved)

    def made(self, result: Any, kept: int) -> None:
        """Note the memory after an operation with this result; ``kept`` bytes are ours."""
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
