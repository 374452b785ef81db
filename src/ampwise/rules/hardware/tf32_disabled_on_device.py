"""TF32 tensor cores that FP32 matmuls do not use."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.hardware.device import CudaDevice
from ampwise.hardware.machine import MachineRequirements

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP703",
    name="tf32-disabled-on-device",
    severity=Severity.INFO,
    summary="The GPU has TF32 tensor cores, but FP32 matmuls are set not to use them.",
    why=(
        "By default torch runs FP32 matmuls in full FP32, on the regular cores. TF32 keeps FP32's range and 10 of its "
        "23 mantissa bits, as many as FP16, and runs on the tensor cores. It affects whatever stays in FP32: a run "
        "without autocast, or the parts that autocast leaves alone. Matmuls that autocast runs in FP16 or BF16 are "
        "not affected."
    ),
    fix='Call `torch.set_float32_matmul_precision("high")` before training, if 10 mantissa bits are enough.',
    bad="model(x)  # FP32, at torch's default precision",
    good='torch.set_float32_matmul_precision("high")\nmodel(x)',
)


def check(use: MachineRequirements) -> Iterator[Finding]:
    torch = use.machine.torch
    if torch is None or torch.fp32.matmul_tf32:
        return
    for kind in use.machine.device_kinds:
        if _gains_by_tf32(kind.first):
            yield RULE.at(
                Place(device=kind.torch_names),
                f"FP32 matmuls on {kind.title} do not use its TF32 tensor cores{_cost(kind.first)}",
                evidence={"device": kind.first.name, "matmul_precision": torch.fp32.matmul_precision},
            )


def _gains_by_tf32(device: CudaDevice) -> bool:
    # On AMD other settings decide too.
    if device.compute_capability is None or not device.has_tensor_cores("tf32"):
        return False
    peaks = _peaks(device)
    # On GeForce the two rates are equal, so leaving it off costs nothing.
    return peaks is None or peaks[1] > peaks[0]


def _cost(device: CudaDevice) -> str:
    peaks = _peaks(device)
    if peaks is None:
        return ""
    fp32, tf32 = peaks
    return f": dense peak {fp32 / 1e12:.0f} instead of {tf32 / 1e12:.0f} TFLOP/s"


def _peaks(device: CudaDevice) -> tuple[float, float] | None:
    """Return the FP32 and TF32 peaks, or None unless both are known."""
    known = {} if device.gpu is None else device.gpu.peak_flops
    return (known["fp32"], known["tf32"]) if "fp32" in known and "tf32" in known else None
