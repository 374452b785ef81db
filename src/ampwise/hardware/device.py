"""A device as torch sees it here, and torch's switches for FP32 arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ampwise.hardware.catalog import COMMON_FORMATS, Gpu, compute_capability, nvidia_tensor_cores

__all__ = ["Device", "DeviceKind", "Fp32Switches", "kinds_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One CUDA or ROCm device of this machine.

    ``bf16_claimed`` is what ``torch.cuda.is_bf16_supported()`` says, ``bf16_native`` what it says without
    emulation: a V100 claims BF16 and has none.
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
        """NVIDIA's, as two numbers that compare; None on AMD."""
        return compute_capability(self.capability)

    def has_matrix_units(self, fmt: str) -> bool | None:
        """Whether matrix products of a format run on matrix units: by the catalog, else by the capability."""
        if self.gpu is not None:
            return self.gpu.has_matrix_units(fmt)
        capability = self.compute_capability
        return None if capability is None else nvidia_tensor_cores(fmt, capability)

    @property
    def matrix_units(self) -> dict[str, bool | None]:
        """has_matrix_units() of each common format."""
        return {fmt: self.has_matrix_units(fmt) for fmt in COMMON_FORMATS}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the catalog entry by its id."""
        return {
            "index": self.index,
            "name": self.name,
            "capability": self.capability,
            "memory_bytes": self.memory_bytes,
            "bf16_claimed": self.bf16_claimed,
            "bf16_native": self.bf16_native,
            "catalog_id": None if self.gpu is None else self.gpu.id,
            "matrix_units": self.matrix_units,
        }


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices that differ in nothing but their index: eight H200s are one thing to say."""

    devices: tuple[Device, ...]

    @property
    def first(self) -> Device:
        """The one to ask; the others would answer the same."""
        return self.devices[0]

    @property
    def title(self) -> str:
        """Such as "NVIDIA L4" or "8 × NVIDIA H200"."""
        return f"{len(self.devices)} × {self.first.name}" if len(self.devices) > 1 else self.first.name

    @property
    def torch_names(self) -> str:
        """What a script calls them, such as "cuda:0" or "cuda:0,1"."""
        return f"cuda:{','.join(str(device.index) for device in self.devices)}"


def kinds_of(devices: Iterable[Device]) -> list[DeviceKind]:
    """The devices, alike ones together, in the order of their first."""
    kinds: list[list[Device]] = []
    for device in devices:
        alike = next((kind for kind in kinds if replace(device, index=kind[0].index) == kind[0]), None)
        if alike is None:
            kinds.append([device])
        else:
            alike.append(device)
    return [DeviceKind(tuple(kind)) for kind in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Switches:
    """What torch may do with FP32 operands on a CUDA device, as it is set now."""

    matmul_tf32: bool
    convolution_tf32: bool
    # torch.get_float32_matmul_precision(); None where torch refuses, because the newer switches contradict it
    matmul_precision: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)
