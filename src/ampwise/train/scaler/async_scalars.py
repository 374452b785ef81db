"""Numbers copied from the device to the host asynchronously, and read when they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["AsyncScalars"]

BUFFERS_AT_A_TIME = 64  # buffers allocated at a time: pinned memory is slow to get


class AsyncScalars:
    """Numbers being copied from the device. ``read`` syncs with their copy only, not with later work.

    The numbers of several tensors of one device are concatenated.
    """

    def __init__(self, *parts: Tensor) -> None:
        self._numbers: list[float] | None = None
        self._on_device: tuple[Tensor, ...] | None = None
        self._on_host: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None
        if not parts[0].is_cuda:
            self._numbers = _numbers_of(parts)
        elif torch.cuda.is_current_stream_capturing():
            self._on_device = parts  # each replay of the graph overwrites them
        else:
            self._send(parts)

    def _send(self, parts: tuple[Tensor, ...]) -> None:
        for part in parts:
            self._on_host.append(_pinned_buffer(part).copy_(part, non_blocking=True))
        self._arrived = torch.cuda.current_stream(parts[0].device).record_event()

    def read(self) -> list[float]:
        """Return the numbers; syncs if they have not arrived."""
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
        """Whether reading would not sync."""
        return self._numbers is not None or (self._arrived is not None and self._arrived.query())

    @property
    def lags(self) -> bool:
        """Whether the numbers are copied asynchronously, so that reading at once would sync."""
        return self._arrived is not None

    @property
    def captured(self) -> bool:
        """Whether the numbers belong to a CUDA graph capture: each replay writes them."""
        return self._on_device is not None


_pinned_buffers: dict[tuple[torch.dtype, torch.Size], deque[Tensor]] = {}


def _pinned_buffer(part: Tensor) -> Tensor:
    """Return an unused pinned host buffer of the tensor's shape and dtype."""
    free = _pinned_buffers.setdefault((part.dtype, part.shape), deque())
    while True:
        try:
            return free.popleft()
        except IndexError:  # none left; another thread may have taken the last
            with torch.inference_mode(False):  # inference tensors could not be written to outside inference_mode
                new = torch.empty(BUFFERS_AT_A_TIME, *part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
                free.extend(new.unbind())


def _numbers_of(parts: Sequence[Tensor]) -> list[float]:
    return [float(number) for part in parts for number in part.reshape(-1).tolist()]
