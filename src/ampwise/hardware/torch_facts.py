"""What the installed torch says about itself and its devices. Torch is imported here, and only when asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampwise.hardware.catalog import find_gpu
from ampwise.hardware.device import Device, Fp32Switches

__all__ = ["TorchFacts", "read_device", "read_devices", "read_fp32_switches", "read_torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """An installed torch: its versions, its devices, its FP32 switches."""

    version: str
    cuda: str | None  # the CUDA it was built with; None for a CPU or ROCm build
    hip: str | None  # the ROCm it was built with
    devices: tuple[Device, ...]
    mps: bool
    fp32: Fp32Switches
    problem: str | None  # why it sees no device, in torch's own words

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "version": self.version,
            "cuda": self.cuda,
            "hip": self.hip,
            "devices": [device.as_dict() for device in self.devices],
            "mps": self.mps,
            "fp32": self.fp32.as_dict(),
            "problem": self.problem,
        }


def read_torch() -> tuple[TorchFacts | None, str | None]:
    """The installed torch; or None and, if it is there but does not load, why."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of a broken installation
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return None, None if absent else f"{type(error).__name__}: {_first_line(error)}"
    devices, problem = read_devices(torch)
    facts = TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        devices=devices,
        mps=torch.backends.mps.is_available(),
        fp32=read_fp32_switches(torch),
        problem=problem,
    )
    return facts, None


def read_devices(torch: Any) -> tuple[tuple[Device, ...], str | None]:
    """Torch's CUDA or ROCm devices; if there are none, what torch said about it.

    ``is_available()`` answers False to a driver that is too old, and only warns: that warning is the answer
    to "why does it not see my GPU?".
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            devices = tuple(read_device(torch, index) for index in range(count))
        except RuntimeError as error:
            return (), _first_line(error)
    said = [str(warning.message) for warning in heard if issubclass(warning.category, UserWarning)]
    return devices, _first_line(said[0]) if said and not devices else None


def read_device(torch: Any, index: int) -> Device:
    """One CUDA or ROCm device, by torch's index."""
    properties = torch.cuda.get_device_properties(index)
    # On ROCm (major, minor) of an MI250X reads (9, 0), like a Hopper: only the architecture name is safe.
    capability = (
        properties.gcnArchName.partition(":")[0] if torch.version.hip else f"{properties.major}.{properties.minor}"
    )
    with torch.cuda.device(index):  # is_bf16_supported() is about the current device
        claimed = bool(torch.cuda.is_bf16_supported())
        native = bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return Device(
        index=index,
        name=properties.name,
        capability=capability,
        memory_bytes=properties.total_memory,
        bf16_claimed=claimed,
        bf16_native=native,
        gpu=find_gpu(properties.name),
    )


def read_fp32_switches(torch: Any) -> Fp32Switches:
    """The TF32 switches as they are set now.

    Since torch 2.9 each has an old and a new name. Once a script has used both, reading the old name raises;
    the new one always tells what will happen, so it is asked first.
    """
    backends = torch.backends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions call reading the old names deprecated
        return Fp32Switches(
            matmul_tf32=_uses_tf32(
                lambda: backends.cuda.matmul.fp32_precision, lambda: backends.cuda.matmul.allow_tf32
            ),
            convolution_tf32=_uses_tf32(lambda: backends.cudnn.conv.fp32_precision, lambda: backends.cudnn.allow_tf32),
            matmul_precision=_matmul_precision(torch),
        )


def _uses_tf32(new: Callable[[], str], old: Callable[[], bool]) -> bool:
    try:
        return new() == "tf32"
    except AttributeError:  # torch before 2.9
        return bool(old())


def _matmul_precision(torch: Any) -> str | None:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # the old and the new switches contradict each other
        return None


def _first_line(said: object) -> str:
    return str(said).strip().partition("\n")[0]
