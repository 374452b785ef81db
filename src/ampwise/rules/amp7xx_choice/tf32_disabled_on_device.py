from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.bench.verdict import OPTIONAL, ratio_text

if TYPE_CHECKING:
    from ampwise.hardware.machine import MachineRequirements
    from ampwise.tune.bench.speeds import SpeedComparison

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


def check_hardware(use: MachineRequirements) -> Findings:
    torch = use.machine.torch
    if torch is None or torch.fp32.matmul_tf32:
        return
    for kind in use.machine.device_kinds:
        device = kind.first
        # On AMD other settings decide too.
        if device.compute_capability is None or not device.has_tensor_cores("tf32"):
            continue
        peaks = {} if device.gpu is None else device.gpu.peak_flops
        known = "fp32" in peaks and "tf32" in peaks
        if known and peaks["tf32"] <= peaks["fp32"]:  # as on GeForce: leaving it off costs nothing
            continue
        cost = f": dense peak {peaks['fp32'] / 1e12:.0f} instead of {peaks['tf32'] / 1e12:.0f} TFLOP/s" if known else ""
        yield RULE.at(
            Place(device=kind.torch_names),
            f"FP32 matmuls on {kind.title} do not use its TF32 tensor cores{cost}",
            evidence={"device": device.name, "matmul_precision": torch.fp32.matmul_precision},
        )


def check_speed(speeds: SpeedComparison) -> Findings:
    row = speeds.best
    if row is None or row.precision != "tf32" or row.ratio is None or "matmuls" in speeds.tf32_was_on:
        return
    if row.ratio.median >= OPTIONAL:
        yield RULE.at(
            Place(device=speeds.device_name),
            f"FP32 matmuls do not use TF32 in this script; with it, a step is {ratio_text(row.ratio.median)} as fast",
            evidence={"ratio": row.ratio.median, "experiment": speeds.experiment("--precisions fp32,tf32")},
        )
