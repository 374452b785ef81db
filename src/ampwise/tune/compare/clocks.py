"""Clocks: the device's events where it has them, else the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Clock", "clock_for"]


class Clock(Protocol):
    """Runs work several times in a row and times it."""

    def __call__(self, work: Callable[[], object], times: int) -> float:
        """Return seconds per call. Syncs the device."""


def clock_for(device: torch.device) -> Clock:
    """Return the clock that measures this device."""
    return _CudaClock(device) if device.type == "cuda" else _HostClock(_synchronize_for(device))


class _CudaClock:
    """Times between two events in the device's own queue: host work after the last launch does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], object], times: int) -> float:
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.current_stream(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(times):
            work()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times


class _HostClock:
    def __init__(self, wait: Callable[[], object]) -> None:
        self._synchronize = wait

    def __call__(self, work: Callable[[], object], times: int) -> float:
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            work()
        self._synchronize()
        return (time.perf_counter() - begin) / times


def _synchronize_for(device: torch.device) -> Callable[[], object]:
    backend: Any = getattr(torch, device.type, None)
    wait: Callable[[], object] | None = getattr(backend, "synchronize", None)
    return (lambda: None) if device.type == "cpu" or wait is None else wait
