"""The installed torch and its devices. torch is imported only when needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampwise.hardware.catalog import find_gpu
from ampwise.hardware.device import CudaDevice, Fp32Switches


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchInfo:
    """An installed torch: its versions, devices and TF32 settings."""

    version: str
    cuda: str | None  # the CUDA it was built with; None for a CPU or ROCm build
    hip: str | None  # the ROCm it was built with
    devices: tuple[CudaDevice, ...]
    mps: bool
    fp32: Fp32Switches
    problem: str | None  # torch's message on why it sees no device

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "version": self.version,
            "cuda": self.cuda,
            "hip": self.hip,
            "devices": [device.as_dict() for device in self.devices],
            "mps": self.mps,
            "fp32": self.fp32.as_dict(),
            "problem": self.problem,
        }


def read_torch() -> tuple[TorchInfo | None, str | None]:
    """Return the installed torch; or None and, if it is installed but does not load, the reason."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of a broken installation
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return None, None if absent else f"{type(error).__name__}: {_first_line(error)}"
    devices, problem = read_devices(torch)
    facts = TorchInfo(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        devices=devices,
        mps=torch.backends.mps.is_available(),
        fp32=read_fp32_switches(torch),
        problem=problem,
    )
    return facts, None


def read_devices(torch: Any) -> tuple[tuple[CudaDevice, ...], str | None]:
    """Return torch's CUDA or ROCm devices; if there are none, torch's warning about it.

    ``is_available()`` returns False for a driver that is too old, with a warning, which explains why torch does not see
    the GPU.
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


def read_device(torch: Any, index: int) -> CudaDevice:
    """Return one CUDA or ROCm device, by torch's index."""
    properties = torch.cuda.get_device_properties(index)
    # On ROCm, (major, minor) of an MI250X is (9, 0), like a Hopper: only the architecture name is safe.
    capability = (
        properties.gcnArchName.partition(":")[0] if torch.version.hip else f"{properties.major}.{properties.minor}"
    )
    with torch.cuda.device(index):  # is_bf16_supported() reports on the current device
        claimed = bool(torch.cuda.is_bf16_supported())
        native = bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return CudaDevice(
        index=index,
        name=properties.name,
        capability=capability,
        memory_bytes=properties.total_memory,
        bf16_claimed=claimed,
        bf16_native=native,
        gpu=find_gpu(properties.name),
    )


def read_fp32_switches(torch: Any) -> Fp32Switches:
    """Return the current TF32 settings.

    Since torch 2.9 each has an old and a new name. Once a script has used both, reading the old name raises; the new
    one always gives the effective setting, so it is read first.
    """
    backends = torch.backends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions warn when the old names are read
        try:
            precision = str(torch.get_float32_matmul_precision())
        except RuntimeError:  # the old and the new settings contradict each other
            precision = None
        return Fp32Switches(
            matmul_tf32=_uses_tf32(
                lambda: backends.cuda.matmul.fp32_precision, lambda: backends.cuda.matmul.allow_tf32
            ),
            convolution_tf32=_uses_tf32(lambda: backends.cudnn.conv.fp32_precision, lambda: backends.cudnn.allow_tf32),
            matmul_precision=precision,
        )


def _uses_tf32(new: Callable[[], str], old: Callable[[], bool]) -> bool:
    try:
        return new() == "tf32"
    except AttributeError:  # torch before 2.9
        return bool(old())


def _first_line(said: object) -> str:
    return str(said).strip().partition("\n")[0]
