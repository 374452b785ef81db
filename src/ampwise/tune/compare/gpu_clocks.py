"""GPU clocks during a measurement, read from the driver through nvidia-ml-py where that is installed."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

import torch

from ampwise.tune.compare.speeds import GpuClocks

__all__ = ["ClockWatch"]

# NVML's bits for why a clock is below its maximum; others, such as "idle", say nothing about load.
REASONS = {
    0x04: "its power limit",
    0x08: "a slowdown in hardware",
    0x20: "its temperature",
    0x40: "its temperature, in hardware",
    0x80: "a power brake",
}


class ClockWatch:
    """Samples the GPU's clock. Without the driver's library it does nothing and has no result."""

    def __init__(self, device: torch.device) -> None:
        self._seen: list[int] = []
        self._reasons = 0
        self._nvml: Any = None
        self._handle: Any = None
        if device.type == "cuda":
            with contextlib.suppress(Exception):  # a missing package, an old driver, a device without names
                self._nvml, self._handle = _opened(device)

    def look(self) -> None:
        """Take a sample."""
        if self._handle is None:
            return
        with contextlib.suppress(Exception):
            self._seen.append(int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)))
            self._reasons |= int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def seen(self) -> GpuClocks | None:
        """Return the clocks from the first sample to the last; None without samples."""
        if len(self._seen) < 2:
            return None
        try:
            top = int(self._nvml.nvmlDeviceGetMaxClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        except Exception:  # some devices do not report it
            return None
        return GpuClocks(
            before=self._seen[0],
            after=self._seen[-1],
            lowest=min(self._seen[1:]),  # the GPU was idle at the first
            top=top,
            held_back_by=tuple(words for bit, words in REASONS.items() if self._reasons & bit),
        )


def _opened(device: torch.device) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a package of the same name warns that it is the wrong one
        nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    # By UUID: the driver numbers devices differently from CUDA_VISIBLE_DEVICES.
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return nvml, nvml.nvmlDeviceGetHandleByUUID(name.encode())
