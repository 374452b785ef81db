"""Description of this machine: Python, CPU, driver, torch and its devices.

The classes here need no torch; on a machine without it, ``Machine.torch`` is None.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

from ampwise.hardware.cpu import Cpu, describe_cpu
from ampwise.hardware.device import CudaDevice, DeviceKind, group_devices
from ampwise.hardware.driver import driver_version
from ampwise.hardware.torch_info import TorchInfo, read_torch

__all__ = ["Machine", "MachineRequirements", "describe_machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as a training script sees it."""

    python: str
    platform: str
    cpu: Cpu
    driver: str | None  # NVIDIA's; None if there is none, or it does not answer
    torch: TorchInfo | None
    torch_problem: str | None = None  # why the installed torch does not load

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """Devices that torch sees; none without torch."""
        return () if self.torch is None else self.torch.devices

    @property
    def device_kinds(self) -> list[DeviceKind]:
        """Devices, with identical ones grouped."""
        return group_devices(self.devices)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "python": self.python,
            "platform": self.platform,
            "cpu": self.cpu.as_dict(),
            "driver": self.driver,
            "torch": None if self.torch is None else self.torch.as_dict(),
            "torch_problem": self.torch_problem,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRequirements:
    """Input of the hardware rules: a machine, and the formats that its tensor cores should run."""

    machine: Machine
    wanted: tuple[str, ...] = ()


def describe_machine() -> Machine:
    """Describe this machine; imports torch if it is installed, and initialises CUDA if there is a device.

    >>> describe_machine().python == platform.python_version()
    True
    """
    facts, problem = read_torch()
    return Machine(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=describe_cpu(),
        driver=driver_version(),
        torch=facts,
        torch_problem=problem,
    )
