"""Clocks: a stopwatch for work on a device, and the GPU's own clock while it works."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from ampwise.hardware.nvml import NvmlDevice, NvmlError
from ampwise.tune.bench.speeds import GpuClocks

Clock = Callable[[Callable[[], object], int], float]  # runs work several times, returns seconds per call; syncs

# NVML's bits for why a clock is below its maximum; others, such as "idle", say nothing about load.
REASONS = {
    0x04: "its power limit",
    0x08: "a slowdown in hardware",
    0x20: "its temperature",
    0x40: "its temperature, in hardware",
    0x80: "a power brake",
}


def clock_for(device: torch.device) -> Clock:
    """Return the clock that measures this device: by its events where it has them, else by the host's clock."""

    def by_events(work: Callable[[], object], times: int) -> float:
        """Time between two events in the device's own queue: host work after the last launch does not count."""
        torch.cuda.synchronize(device)
        stream = torch.cuda.current_stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(times):
            work()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    def on_host(work: Callable[[], object], times: int) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            work()
        synchronize()
        return (time.perf_counter() - begin) / times

    backend: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
    synchronize: Callable[[], object] = getattr(backend, "synchronize", lambda: None)
    return by_events if device.type == "cuda" else on_host


class ClockWatch:
    """Samples the GPU's clock. Where the driver does not answer, it does nothing and has no result."""

    def __init__(self, device: torch.device) -> None:
        self._seen: list[int] = []
        self._reasons = 0
        self._gpu = opened(device)

    def look(self) -> None:
        """Take a sample."""
        if self._gpu is None:
            return
        with contextlib.suppress(NvmlError):
            self._seen.append(self._gpu.clock_mhz())
            self._reasons |= self._gpu.throttle_reasons()

    def seen(self) -> GpuClocks | None:
        """Return the clocks from the first sample to the last; None without samples."""
        if self._gpu is None or len(self._seen) < 2:
            return None
        try:
            top = self._gpu.top_clock_mhz()
        except NvmlError:  # some devices do not report it
            return None
        return GpuClocks(
            before=self._seen[0],
            after=self._seen[-1],
            lowest=min(self._seen[1:]),  # the GPU was idle at the first
            top=top,
            held_back_by=tuple(words for bit, words in REASONS.items() if self._reasons & bit),
        )


def energy_of(work: Callable[[], object], calls: int, device: torch.device) -> float | None:
    """Return the joules that a call takes, over so many calls; None where the driver does not say."""
    gpu = opened(device)
    if gpu is None:
        return None
    try:
        torch.cuda.synchronize(device)
        before = gpu.joules()
        for _ in range(calls):
            work()
        torch.cuda.synchronize(device)
        return (gpu.joules() - before) / calls
    except NvmlError:  # GPUs before Volta do not count it
        return None


def opened(device: torch.device) -> NvmlDevice | None:
    """Return the driver's view of a device; None where there is none."""
    if device.type != "cuda":
        return None
    try:
        return NvmlDevice(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except (NvmlError, AttributeError, RuntimeError):  # no driver's library, or a device without a name
        return None
