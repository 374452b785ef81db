"""Facts that travel to the host by themselves: copied without waiting, read when they have arrived."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Posted"]

BYTES = 8  # room for a number of any kind, where all begin aligned


class Posted:
    """Numbers on their way from the device. ``read`` waits for their arrival and for nothing that came after.

    Given several tensors of one device, their numbers follow each other.
    """

    def __init__(self, *parts: Tensor) -> None:
        self._numbers: list[float] | None = None
        self._on_device: tuple[Tensor, ...] | None = None
        self._on_host: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None
        if not parts[0].is_cuda:
            self._numbers = _numbers_of(parts)
        elif torch.cuda.is_current_stream_capturing():
            self._on_device = parts  # each replay of the graph writes them anew
        else:
            self._send(parts)

    def _send(self, parts: tuple[Tensor, ...]) -> None:
        room = torch.empty(
            BYTES * sum(part.numel() for part in parts), dtype=torch.uint8, device="cpu", pin_memory=True
        )
        begin = 0
        for part in parts:
            count = part.numel()
            place = room[begin : begin + count * part.element_size()].view(part.dtype)
            self._on_host.append(place.copy_(part.reshape(count), non_blocking=True))
            begin += BYTES * count
        self._arrived = torch.cuda.current_stream(parts[0].device).record_event()

    def read(self) -> list[float]:
        """The numbers; waits if they are not there yet."""
        if self._on_device is not None:
            return _numbers_of(self._on_device)
        if self._numbers is None:
            assert self._arrived is not None
            self._arrived.synchronize()
            self._numbers = _numbers_of(self._on_host)
            self._on_host.clear()
        return self._numbers

    @property
    def arrived(self) -> bool:
        """Reading would not wait."""
        return self._numbers is not None or (self._arrived is not None and self._arrived.query())

    @property
    def lags(self) -> bool:
        """Reading at once would have waited for the device."""
        return self._arrived is not None

    @property
    def captured(self) -> bool:
        """Part of a CUDA graph: there are no numbers yet."""
        return self._on_device is not None


def _numbers_of(parts: list[Tensor] | tuple[Tensor, ...]) -> list[float]:
    return [float(number) for part in parts for number in part.reshape(-1).tolist()]
