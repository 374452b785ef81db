from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.hardware.machine import MachineRequirements
    from ampwise.tune.advise.choice import PrecisionChoice

# Formats to suggest instead, narrowest first.
ALTERNATIVES = ("nvfp4", "mxfp4", "mxfp8", "fp8", "bf16", "fp16", "tf32")
# The first NVIDIA generation with each format.
SINCE = {
    "fp16": "Volta (7.0)",
    "bf16": "Ampere (8.0)",
    "tf32": "Ampere (8.0)",
    "fp8": "Ada (8.9) and Hopper (9.0)",
    "mxfp8": "Blackwell (10.0)",
    "mxfp4": "Blackwell (10.0)",
    "nvfp4": "Blackwell (10.0)",
}

RULE = Rule(
    code="AMP702",
    name="format-without-tensor-cores",
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


def check_hardware(use: MachineRequirements) -> Findings:
    torch = use.machine.torch
    if use.wanted and not (torch is not None and (torch.mps or use.machine.devices)):
        yield RULE.at(
            Place(device="cpu"),
            f"{', '.join(use.wanted)} requested, but torch has no GPU here",
            evidence={"wanted": list(use.wanted)},
            fix="Run it on a machine where torch sees a GPU; `ampwise gpu` shows what it sees.",
        )
    for kind in use.machine.device_kinds:
        device = kind.first
        present = [fmt for fmt in ALTERNATIVES if device.has_tensor_cores(fmt)]
        for fmt in use.wanted:
            if device.has_tensor_cores(fmt) is False:
                yield RULE.at(
                    Place(device=kind.torch_names),
                    f"{kind.title} ({device.capability}) has no {fmt} tensor cores",
                    evidence={"device": device.name, "capability": device.capability, "format": fmt},
                    fix=f"Use one it supports: {', '.join(present)}." if present else None,
                )


def check_choice(choice: PrecisionChoice) -> Findings:
    target, want = choice.target, choice.want
    if want is None or want == "fp32" or (want == "bf16" and target.emulates_bf16):  # which AMP701 reports
        return
    name = want.upper()
    # Torch has a switch for TF32 on CUDA devices only.
    has = False if want == "tf32" and target.kind not in ("cuda", None) else target.has(want)
    if has is None:
        yield choice.finding(
            "careful",
            RULE,
            f"it is unknown whether {target.name} has {name} tensor cores; NVIDIA has had them since {SINCE[want]}",
            costs={
                f"{name} without tensor cores": "emulated (slower than FP32) or not supported",
                "checking first": "a second",
            },
            show=("ampwise gpu", "the formats that this machine's tensor cores support"),
            do="Check the device first; Engine(precision='auto') does.",
        )
    if has is not False:
        return
    since = f"; on NVIDIA they start with {SINCE[want]}" if target.capability is not None else ""
    fact, cost = (
        f"{target.title} has no {name} tensor cores{since}",
        "its kernels do not run, or it is emulated and slower",
    )
    if target.kind == "cpu":
        fact = f"{target.name} has no instructions that multiply {name} matrices"
        cost = "no faster than FP32, usually slower"
    elif target.has(want):
        fact = f"torch has a switch for {name} on CUDA devices only: it changes nothing on {target.name}"
    elif want == "fp16" and not target.formats:
        cost = "half the activation memory, but a GradScaler and no tensor cores to speed it up"
    costs = {f"{name} here": cost}
    if target.half is not None:
        gain = choice.gain(target.half)
        faster = "" if gain is None else f"; {gain.text} {gain.over.upper()} expected (derived)"
        price = "no loss scale, 8 significant bits" if target.half == "bf16" else "a GradScaler"
        costs[target.half.upper()] = price + faster
    if target.gpu is None:
        show = "ampwise gpu", "the formats that the tensor cores here support"
    else:
        show = f"ampwise gpu {target.gpu.id}", "the formats its tensor cores support, and their rates"
    scaled = " with a GradScaler" if choice.half == "fp16" else ""
    do = f"Train in {(choice.half or 'fp32').upper()}{scaled}."
    costs["FP32"] = "no extra code, no speedup"
    yield choice.finding("no", RULE, fact, costs=costs, show=show, do=do, refuses=want)
