"""What a device runs fast: the catalog and the lookup; and what this machine is."""

from __future__ import annotations

from ampwise.hardware.catalog import Figure, Gpu, find_gpu, gpu_named, gpus
from ampwise.hardware.cpu import Cpu
from ampwise.hardware.device import Device, DeviceKind, Fp32Switches
from ampwise.hardware.machine import Machine, MachineUse, describe_machine
from ampwise.hardware.torch_facts import TorchFacts

__all__ = [
    "Cpu",
    "Device",
    "DeviceKind",
    "Figure",
    "Fp32Switches",
    "Gpu",
    "Machine",
    "MachineUse",
    "TorchFacts",
    "describe_machine",
    "find_gpu",
    "gpu_named",
    "gpus",
]
