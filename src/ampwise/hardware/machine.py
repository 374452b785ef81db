"""This machine: Python, CPU, driver, torch and its devices.

The records here need no torch; a machine without torch is a Machine whose ``torch`` is None.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

from ampwise.hardware.cpu import Cpu, describe_cpu
from ampwise.hardware.device import Device, DeviceKind, kinds_of
from ampwise.hardware.driver import driver_version
from ampwise.hardware.torch_facts import TorchFacts, read_torch

__all__ = ["Machine", "MachineUse", "describe_machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a training script would find here."""

    python: str
    platform: str
    cpu: Cpu
    driver: str | None  # NVIDIA's; None when there is none, or it does not answer
    torch: TorchFacts | None
    torch_problem: str | None = None  # why an installed torch does not load

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices torch sees; none without torch."""
        return () if self.torch is None else self.torch.devices

    @property
    def device_kinds(self) -> list[DeviceKind]:
        """The devices, alike ones together."""
        return kinds_of(self.devices)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "python": self.python,
            "platform": self.platform,
            "cpu": self.cpu.as_dict(),
            "driver": self.driver,
            "torch": None if self.torch is None else self.torch.as_dict(),
            "torch_problem": self.torch_problem,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """What the hardware rules look at: a machine, and the formats somebody wants its matrix units to run."""

    machine: Machine
    wanted: tuple[str, ...] = ()


def describe_machine() -> Machine:
    """This machine, asked now; imports torch if it is installed, and starts CUDA if there is a device.

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
