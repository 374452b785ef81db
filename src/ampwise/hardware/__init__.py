"""Catalog of devices and what they run fast, and a description of this machine."""

from __future__ import annotations

from ampwise.hardware.catalog import Figure, Gpu, find_gpu, gpu_named, gpus
from ampwise.hardware.cpu import Cpu
from ampwise.hardware.device import CudaDevice, DeviceKind, Fp32Switches
from ampwise.hardware.machine import Machine, MachineRequirements, describe_machine
from ampwise.hardware.torch_info import TorchInfo

__all__ = [
    "Cpu",
    "CudaDevice",
    "DeviceKind",
    "Figure",
    "Fp32Switches",
    "Gpu",
    "Machine",
    "MachineRequirements",
    "TorchInfo",
    "describe_machine",
    "find_gpu",
    "gpu_named",
    "gpus",
]
