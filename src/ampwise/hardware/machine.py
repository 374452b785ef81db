"""Description of this machine: Python, CPU, driver, torch and its devices.

The classes here need no torch; on a machine without it, ``Machine.torch`` is None.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampwise.finding.terminal import shortened
from ampwise.hardware.cpu import Cpu, describe_cpu
from ampwise.hardware.device import CudaDevice, DeviceKind, group_devices
from ampwise.hardware.programs import find_program
from ampwise.hardware.torch_info import TorchInfo, read_torch

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
PROGRAM = "nvidia-smi"
QUERY = ("--query-gpu=driver_version", "--format=csv,noheader")
QUERY_TIMEOUT_S = 10.0  # without persistence mode, the driver initialises every GPU first


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as a training script sees it."""

    python: str
    platform: str
    cpu: Cpu
    driver: str | None  # NVIDIA's; None if there is none, or it does not answer
    torch: TorchInfo | None
    torch_problem: str | None = None  # why the installed torch does not load

    def __repr__(self) -> str:
        torch = "no torch" if self.torch is None else f"torch {self.torch.version}"
        devices = ", ".join(each.title for each in self.device_kinds) or "no GPU"
        return shortened(f"<Machine: {devices}, {self.cpu.model or 'unknown CPU'}, {torch}, Python {self.python}>")

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


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, without torch; None if there is no driver, or it does not answer."""
    try:
        return parse_driver_version(KERNEL_MODULE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        pass
    import subprocess  # rarely needed, and slow to import

    program = find_program(PROGRAM)
    if program is None:
        return None
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_driver_version(done.stdout)


def parse_driver_version(text: str) -> str | None:
    """Return the version in the kernel module's banner or in nvidia-smi's output.

    >>> parse_driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19")
    '535.129.03'
    >>> parse_driver_version("NVIDIA-SMI has failed because it couldn't communicate with the driver") is None
    True
    """
    lines = text.splitlines()
    match = re.search(r"(?<![\d.])\d{3,}\.\d+(\.\d+)?(?![\d.])", lines[0]) if lines else None
    return match[0] if match else None
