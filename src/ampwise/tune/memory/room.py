"""How much memory a device has for torch, and what that number rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ampwise.errors import BadInput
from ampwise.hardware.catalog import COMMON_FORMATS, Gpu, gpu_named, gpus
from ampwise.hardware.device import Device

__all__ = ["CONTEXT", "GIB", "Room", "cublas_workspaces", "room_here", "room_of", "room_sizes"]

MIB, GIB = 2**20, 2**30

# What is there before the first tensor: CUDA's context and the kernels it has loaded. An allowance: it differs by GPU,
# driver and by which kernels are used.
CONTEXT = 600 * MIB
# Of what a vendor says, what torch does not see: the driver's own, and error correction. Of 141 GB it sees 139.8.
NOT_SEEN = 0.02

# cuBLAS has a workspace in each thread that calls it, forward and backward, and cuBLASLt one for the forward pass.
THREADS = 2
WORKSPACE, HOPPER_WORKSPACE = 8_519_680, 32 * MIB
LT_WORKSPACE = MIB
HOPPER = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of a device."""

    name: str
    total: int  # bytes
    basis: str  # "measured here" or "datasheet"
    capability: tuple[int, int] | None
    lacks: tuple[str, ...] = ()  # the formats that it has no matrix units for

    @property
    def usable(self) -> int:
        """What torch may reserve of it."""
        seen = self.total if self.basis == "measured here" else round(self.total * (1 - NOT_SEEN))
        return seen - CONTEXT

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "memory_bytes": self.total, "usable_bytes": self.usable, "basis": self.basis}


def room_of(gpu: Gpu | str) -> Room:
    """Of a device of the catalog, or of its name."""
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    memory = gpu.figure("memory_bytes")
    if memory is None:
        raise BadInput(f"--gpu {gpu.id}: the catalog does not know how much memory it has.")
    return Room(
        name=gpu.name,
        total=int(memory.value),
        basis="datasheet",
        capability=gpu.compute_capability,
        lacks=_lacking(gpu),
    )


def room_here() -> Room | None:
    """Of this machine's first GPU; None without one."""
    import torch

    from ampwise.hardware.torch_facts import read_devices

    devices, _ = read_devices(torch)
    return _measured(devices[0]) if devices else None


def _measured(device: Device) -> Room:
    return Room(
        name=device.name,
        total=device.memory_bytes,
        basis="measured here",
        capability=device.compute_capability,
        lacks=_lacking(device),
    )


def _lacking(device: Gpu | Device) -> tuple[str, ...]:
    return tuple(fmt for fmt in COMMON_FORMATS if device.has_matrix_units(fmt) is False)


def room_sizes() -> list[Room]:
    """The sizes of memory that NVIDIA's GPUs have, by the catalog, each with the names of those that have it."""
    by_size: dict[int, list[str]] = {}
    for gpu in gpus():
        if gpu.compute_capability is not None and gpu.memory_bytes is not None:
            by_size.setdefault(gpu.memory_bytes, []).append(gpu.id)
    return [
        Room(name=", ".join(names), total=size, basis="datasheet", capability=None)
        for size, names in sorted(by_size.items())
    ]


def cublas_workspaces(capability: tuple[int, int] | None) -> int:
    """Bytes; of a GPU that is not known, as much as on Hopper."""
    each = WORKSPACE if capability is not None and capability < HOPPER else HOPPER_WORKSPACE
    return THREADS * each + LT_WORKSPACE
