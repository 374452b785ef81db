"""A device as torch sees it, and torch's TF32 settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ampwise.hardware.catalog import COMMON_FORMATS, Gpu, compute_capability, nvidia_tensor_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A CUDA or ROCm device of this machine.

    ``bf16_claimed`` is the result of ``torch.cuda.is_bf16_supported()``, ``bf16_native`` the result without
    emulation: a V100 claims BF16 and only emulates it.
    """

    index: int
    name: str
    capability: str  # "9.0" on NVIDIA, "gfx942" on AMD, where torch's pair of numbers means something else
    memory_bytes: int
    bf16_claimed: bool
    bf16_native: bool
    gpu: Gpu | None  # what the catalog knows about it

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability as two numbers that compare; None on AMD."""
        return compute_capability(self.capability)

    def has_tensor_cores(self, fmt: str) -> bool | None:
        """Return whether matmuls in a format run on tensor cores: by the catalog, else by the capability."""
        if self.gpu is not None:
            return self.gpu.has_tensor_cores(fmt)
        capability = self.compute_capability
        return None if capability is None else nvidia_tensor_cores(fmt, capability)

    @property
    def tensor_cores(self) -> dict[str, bool | None]:
        """has_tensor_cores() of each common format."""
        return {fmt: self.has_tensor_cores(fmt) for fmt in COMMON_FORMATS}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; the catalog entry by its id."""
        return {
            "index": self.index,
            "name": self.name,
            "capability": self.capability,
            "memory_bytes": self.memory_bytes,
            "bf16_claimed": self.bf16_claimed,
            "bf16_native": self.bf16_native,
            "catalog_id": None if self.gpu is None else self.gpu.id,
            "tensor_cores": self.tensor_cores,
        }


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices that differ only in their index, such as eight H200s."""

    devices: tuple[CudaDevice, ...]

    @property
    def first(self) -> CudaDevice:
        """First of the devices; the others are the same."""
        return self.devices[0]

    @property
    def title(self) -> str:
        """Name and number, such as "NVIDIA L4" or "8 × NVIDIA H200"."""
        return f"{len(self.devices)} × {self.first.name}" if len(self.devices) > 1 else self.first.name

    @property
    def torch_names(self) -> str:
        """Device names for a script, such as "cuda:0" or "cuda:0,1"."""
        return f"cuda:{','.join(str(device.index) for device in self.devices)}"


def group_devices(devices: Iterable[CudaDevice]) -> list[DeviceKind]:
    """Group identical devices, in the order of the first of each group."""
    kinds: list[list[CudaDevice]] = []
    for device in devices:
        alike = next((kind for kind in kinds if replace(device, index=kind[0].index) == kind[0]), None)
        if alike is None:
            kinds.append([device])
        else:
            alike.append(device)
    return [DeviceKind(tuple(kind)) for kind in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Switches:
    """torch's current settings for FP32 operations on CUDA devices."""

    matmul_tf32: bool
    convolution_tf32: bool
    # torch.get_float32_matmul_precision(); None if it raises, because the newer settings contradict it
    matmul_precision: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)
