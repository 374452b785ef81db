"""What NVIDIA's driver says of a GPU at work: clocks, what holds them back, energy. Read from its own library."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
SM = 1  # the clock of the multiprocessors


class NvmlError(OSError):
    """The driver's library is missing, or a device does not support a query."""


class NvmlDevice:
    """A GPU, by its UUID: the driver numbers devices differently from CUDA_VISIBLE_DEVICES."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError(f"{LIBRARY} cannot be loaded: {error}") from error
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def clock_mhz(self) -> int:
        """Return the current clock."""
        return self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint, SM)

    def top_clock_mhz(self) -> int:
        """Return the highest clock that the device can have."""
        return self._ask("nvmlDeviceGetMaxClockInfo", ctypes.c_uint, SM)

    def throttle_reasons(self) -> int:
        """Return, as bits, why the clock is below its maximum."""
        return self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)

    def joules(self) -> float:
        """Return the energy used since the driver was loaded, which it updates every 20 to 100 ms."""
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def _ask(self, name: str, kind: Any, *arguments: Any) -> int:
        found = kind()
        self._call(name, self._handle, *arguments, ctypes.byref(found))
        return int(found.value)

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise NvmlError(f"{name}: this driver does not have it") from error
        if code:
            raise NvmlError(f"{name} failed with code {code}")
