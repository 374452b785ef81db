from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.hardware.machine import MachineRequirements

RULE = Rule(
    code="AMP704",
    name="gpu-invisible-to-torch",
    severity=Severity.WARNING,
    summary="An NVIDIA driver is running, but torch sees no GPU.",
    why=(
        "`torch.cuda.is_available()` is False without an error when torch was built without CUDA, when the driver is "
        "older than torch's CUDA needs, or when the environment hides the devices. A script that falls back to the "
        "CPU then trains there, slowly and without a message."
    ),
    fix="Install a torch built for this driver's CUDA, or make the devices visible to this process.",
    bad="$ pip install torch --index-url https://download.pytorch.org/whl/cpu",
    good="$ pip install torch",
)


def check_hardware(use: MachineRequirements) -> Findings:
    torch = use.machine.torch
    if use.machine.driver is None or torch is None or torch.devices:
        return
    if torch.cuda is None:
        cause = f"is built for ROCm {torch.hip}" if torch.hip else "is built without CUDA"
        fix = "Install a build with CUDA; https://pytorch.org/get-started/locally/ gives the command."
    elif torch.problem:
        cause = f"cannot use it: {torch.problem}"
        fix = "Usually the driver is too old for this CUDA version: update it, or install a build for an older CUDA."
    else:
        cause = f"(CUDA {torch.cuda}) sees no device"
        fix = (
            "Check whether CUDA_VISIBLE_DEVICES hides the devices, and whether the container was started with its GPUs."
        )
    yield RULE.at(
        Place(device="cuda"),
        f"NVIDIA driver {use.machine.driver} is running, but torch {torch.version} {cause}",
        evidence={"driver": use.machine.driver, "torch": torch.version, "cuda": torch.cuda},
        fix=fix,
    )
