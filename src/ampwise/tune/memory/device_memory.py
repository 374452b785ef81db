"""Memory of a device that torch can use, and whether that number is measured or from a datasheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ampwise.errors import BadInput
from ampwise.hardware.catalog import COMMON_FORMATS, Gpu, gpu_named, gpus
from ampwise.hardware.device import CudaDevice

MIB, GIB = 2**20, 2**30

# Allowance for CUDA's context and loaded kernels, allocated before the first tensor. It differs by GPU, driver and
# kernels used.
CONTEXT = 600 * MIB
# Share of a vendor's figure that torch does not see: the driver's part, and error correction. Of 141 GB it sees 139.8.
NOT_SEEN = 0.02

# cuBLAS has a workspace in each calling thread, forward and backward, and cuBLASLt one for the forward pass.
THREADS = 2
WORKSPACE, HOPPER_WORKSPACE = 8_519_680, 32 * MIB
LT_WORKSPACE = MIB
HOPPER = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device."""

    name: str
    total: int  # bytes
    basis: str  # "measured here" or "datasheet"
    capability: tuple[int, int] | None
    lacks: tuple[str, ...] = ()  # formats without tensor cores

    @property
    def usable(self) -> int:
        """Bytes that torch may reserve."""
        seen = self.total if self.basis == "measured here" else round(self.total * (1 - NOT_SEEN))
        return seen - CONTEXT

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "memory_bytes": self.total, "usable_bytes": self.usable, "basis": self.basis}


def catalog_memory(gpu: Gpu | str) -> DeviceMemory:
    """Return the memory of a device of the catalog, also by its name."""
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    memory = gpu.figure("memory_bytes")
    if memory is None:
        raise BadInput(f"--gpu {gpu.id}: the catalog has no memory size for it.")
    return _memory_of(gpu, int(memory.value), "datasheet")


def local_memory() -> DeviceMemory | None:
    """Return the memory of this machine's first GPU; None without one."""
    import torch

    from ampwise.hardware.torch_info import read_devices

    devices, _ = read_devices(torch)
    return _memory_of(devices[0], devices[0].memory_bytes, "measured here") if devices else None


def _memory_of(device: Gpu | CudaDevice, total: int, basis: str) -> DeviceMemory:
    return DeviceMemory(
        name=device.name,
        total=total,
        basis=basis,
        capability=device.compute_capability,
        lacks=tuple(fmt for fmt in COMMON_FORMATS if device.has_tensor_cores(fmt) is False),
    )


def catalog_memory_sizes() -> list[DeviceMemory]:
    """Return the memory sizes of NVIDIA's GPUs in the catalog, each with the names of its GPUs."""
    by_size: dict[int, list[str]] = {}
    for gpu in gpus():
        if gpu.compute_capability is not None and gpu.memory_bytes is not None:
            by_size.setdefault(gpu.memory_bytes, []).append(gpu.id)
    return [
        DeviceMemory(name=", ".join(names), total=size, basis="datasheet", capability=None)
        for size, names in sorted(by_size.items())
    ]


def cublas_workspaces(capability: tuple[int, int] | None) -> int:
    """Return the bytes of cuBLAS's workspaces; for an unknown GPU, as on Hopper."""
    each = WORKSPACE if capability is not None and capability < HOPPER else HOPPER_WORKSPACE
    return THREADS * each + LT_WORKSPACE
