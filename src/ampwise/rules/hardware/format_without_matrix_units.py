"""A requested format that the GPU has no tensor cores for."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.hardware.device import CudaDevice
from ampwise.hardware.machine import Machine, MachineRequirements

__all__ = ["RULE", "check"]

# Formats to suggest instead, narrowest first.
ALTERNATIVES = ("nvfp4", "mxfp4", "mxfp8", "fp8", "bf16", "fp16", "tf32")

RULE = Rule(
    code="AMP702",
    name="format-without-matrix-units",
    severity=Severity.WARNING,
    summary="The GPU has no tensor cores for the requested format.",
    why=(
        "A narrow format is fast only where tensor cores support it: on NVIDIA, FP16 since Volta (7.0), BF16 and TF32 "
        "since Ampere (8.0), FP8 since Ada (8.9) and Hopper (9.0), MXFP8 and NVFP4 since Blackwell (10.0). Elsewhere "
        "it is emulated and slow, or its kernels do not run."
    ),
    fix="Use a format the device supports; `ampwise gpu` lists them.",
    bad="$ ampwise gpu --want fp8    # on an A100",
    good="$ ampwise gpu --want bf16",
)


def check(use: MachineRequirements) -> Iterator[Finding]:
    if use.wanted and not _has_accelerator(use.machine):
        yield RULE.at(
            Place(device="cpu"),
            f"{', '.join(use.wanted)} requested, but torch has no GPU here",
            evidence={"wanted": list(use.wanted)},
            fix="Run it on a machine where torch sees a GPU; `ampwise gpu` shows what it sees.",
        )
    for kind in use.machine.device_kinds:
        for fmt in use.wanted:
            if kind.first.has_tensor_cores(fmt) is False:
                yield RULE.at(
                    Place(device=kind.torch_names),
                    f"{kind.title} ({kind.first.capability}) has no {fmt} tensor cores",
                    evidence={"device": kind.first.name, "capability": kind.first.capability, "format": fmt},
                    fix=_fix(kind.first),
                )


def _has_accelerator(machine: Machine) -> bool:
    return machine.torch is not None and (machine.torch.mps or bool(machine.devices))


def _fix(device: CudaDevice) -> str | None:
    present = [fmt for fmt in ALTERNATIVES if device.has_tensor_cores(fmt)]
    return f"Use one it supports: {', '.join(present)}." if present else None
