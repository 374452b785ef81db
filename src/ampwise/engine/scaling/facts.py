"""Facts that travel to the host by themselves: copied without waiting, read when they have arrived."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Posted"]


class Posted:
    """Numbers on their way from the device. ``read`` waits for their arrival and for nothing that came after."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers: list[float] | None = None
        self._on_device: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if not numbers.is_cuda:
            self._numbers = numbers.tolist()
        elif torch.cuda.is_current_stream_capturing():
            self._on_device = numbers  # each replay of the graph writes them anew
        else:
            self._on_host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._on_host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[float]:
        """The numbers; waits if they are not there yet."""
        if self._on_device is not None:
            numbers: list[float] = self._on_device.tolist()
            return numbers
        if self._numbers is None:
            assert self._arrived is not None
            self._arrived.synchronize()
            self._numbers = self._on_host.tolist()
        return self._numbers

    @property
    def arrived(self) -> bool:
        """Reading would not wait."""
        return self._numbers is not None or (self._arrived is not None and self._arrived.query())

    @property
    def lags(self) -> bool:
        """Reading at once would wait for the device."""
        return self._arrived is not None

    @property
    def captured(self) -> bool:
        """Part of a CUDA graph: there are no numbers yet."""
        return self._on_device is not None
