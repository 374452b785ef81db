"""BF16 on a device that only emulates it."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.hardware.device import CudaDevice
from ampwise.hardware.machine import MachineRequirements

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP701",
    name="bf16-without-matrix-units",
    severity=Severity.WARNING,
    summary="The GPU has no BF16 tensor cores, yet torch reports BF16 as supported.",
    why=(
        "NVIDIA GPUs before Ampere (V100, T4, RTX 20) have no BF16 tensor cores. torch emulates BF16 there, and "
        "`torch.cuda.is_bf16_supported()` returns True because a BF16 tensor can be created. A script that relies on "
        "it trains in BF16, and slowly."
    ),
    fix=(
        "Use FP16 with a GradScaler on this GPU, and check `torch.cuda.is_bf16_supported(including_emulation=False)`."
    ),
    bad="dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16",
    good=(
        "native = torch.cuda.is_bf16_supported(including_emulation=False)\n"
        "dtype = torch.bfloat16 if native else torch.float16"
    ),
)


def check(use: MachineRequirements) -> Iterator[Finding]:
    for kind in use.machine.device_kinds:
        device = kind.first
        if device.bf16_claimed and not device.bf16_native:
            yield RULE.at(
                Place(device=kind.torch_names),
                f"{kind.title} (compute capability {device.capability}) has no BF16 tensor cores: "
                "`torch.cuda.is_bf16_supported()` returns True, but BF16 is emulated and slow",
                evidence={"device": device.name, "capability": device.capability},
                fix=_fix(device),
            )


def _fix(device: CudaDevice) -> str | None:
    if device.has_tensor_cores("fp16") is False:
        return "Train in FP32, or in FP16 only to save memory: this GPU has no tensor cores for either."
    return None
