"""Facts that travel to the host by themselves: copied without waiting, read when they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Posted"]

ROOMS = 64  # made at a time: memory that a device can write to is slow to get


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
        for part in parts:
            self._on_host.append(_room_for(part).copy_(part, non_blocking=True))
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


_rooms: dict[tuple[torch.dtype, torch.Size], deque[Tensor]] = {}


def _room_for(part: Tensor) -> Tensor:
    """Host memory of a tensor's form that the device can write to; nobody else has it, or gets it afterwards."""
    free = _rooms.setdefault((part.dtype, part.shape), deque())
    while True:
        try:
            return free.popleft()
        except IndexError:  # the last one is gone, to another thread perhaps
            with torch.inference_mode(False):  # tensors made within could not be written to outside of it
                new = torch.empty(ROOMS, *part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
                free.extend(new.unbind())


def _numbers_of(parts: Sequence[Tensor]) -> list[float]:
    return [float(number) for part in parts for number in part.reshape(-1).tolist()]
