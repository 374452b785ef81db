"""A format that was asked for and that no matrix unit here takes."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.hardware.device import Device
from ampwise.hardware.machine import Machine, MachineUse

__all__ = ["RULE", "check"]

# What one might take instead: the formats for training, narrowest first.
ALTERNATIVES = ("nvfp4", "mxfp4", "mxfp8", "fp8", "bf16", "fp16", "tf32")

RULE = Rule(
    code="AMP702",
    name="format-without-matrix-units",
    severity=Severity.WARNING,
    summary="A format was asked for that the GPU's matrix units do not take.",
    why=(
        "A narrow format is fast only where matrix units multiply it: on NVIDIA, FP16 since Volta (7.0), "
        "BF16 and TF32 since Ampere (8.0), FP8 since Ada (8.9) and Hopper (9.0), MXFP8 and NVFP4 since "
        "Blackwell (10.0). Elsewhere it is emulated, at a loss, or its kernels refuse to run."
    ),
    fix="Ask for a format the device has; `ampwise gpu` lists them.",
    bad="$ ampwise gpu --want fp8    # on an A100",
    good="$ ampwise gpu --want bf16",
)


def check(use: MachineUse) -> Iterator[Finding]:
    if use.wanted and not _has_accelerator(use.machine):
        yield RULE.at(
            Place(device="cpu"),
            f"{', '.join(use.wanted)} asked for, and torch has no GPU here",
            evidence={"wanted": list(use.wanted)},
            fix="Run it where torch sees a GPU; `ampwise gpu` says what it sees.",
        )
    for kind in use.machine.device_kinds:
        for fmt in use.wanted:
            if kind.first.has_matrix_units(fmt) is False:
                yield RULE.at(
                    Place(device=kind.torch_names),
                    f"{kind.title} ({kind.first.capability}) has no {fmt} matrix units",
                    evidence={"device": kind.first.name, "capability": kind.first.capability, "format": fmt},
                    fix=_fix(kind.first),
                )


def _has_accelerator(machine: Machine) -> bool:
    return machine.torch is not None and (machine.torch.mps or bool(machine.devices))


def _fix(device: Device) -> str | None:
    present = [fmt for fmt in ALTERNATIVES if device.has_matrix_units(fmt)]
    return f"Ask for one it has: {', '.join(present)}." if present else None
