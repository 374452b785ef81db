from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.hardware.machine import MachineRequirements
    from ampwise.tune.advise.choice import PrecisionChoice
    from ampwise.watch.run_events import RunEvents

RULE = Rule(
    code="AMP701",
    name="bf16-without-tensor-cores",
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


def check_hardware(use: MachineRequirements) -> Findings:
    for kind in use.machine.device_kinds:
        device = kind.first
        if device.bf16_claimed and not device.bf16_native:
            yield RULE.at(
                Place(device=kind.torch_names),
                f"{kind.title} (compute capability {device.capability}) has no BF16 tensor cores: "
                "`torch.cuda.is_bf16_supported()` returns True, but BF16 is emulated and slow",
                evidence={"device": device.name, "capability": device.capability},
                fix="Train in FP32, or in FP16 only to save memory: this GPU has no tensor cores for either."
                if device.has_tensor_cores("fp16") is False
                else None,
            )


def check_run(run: RunEvents) -> Findings:
    if run.bf16_emulated_on is not None:
        yield RULE.at(Place(device=run.bf16_emulated_on), f"BF16 was used on {run.bf16_emulated_on}, which emulates it")


def check_choice(choice: PrecisionChoice) -> Findings:
    target = choice.target
    if choice.want != "bf16" or not target.emulates_bf16:
        return
    costs = {"BF16 here": "emulated matmuls: no faster than FP32, usually slower; 16-bit memory"}
    if target.has("fp16"):
        ratio = target.ratio("fp16", "fp32")
        peak = "" if ratio is None else f"; matmuls at up to {ratio.show(digits=0)}× the FP32 peak"
        costs["FP16"] = f"a GradScaler, and a few steps skipped while it finds its scale{peak}"
    instead = {
        False: "Train in FP32: there are no FP16 tensor cores either.",
        None: "Train in FP16 with a GradScaler if it has FP16 tensor cores (T4, RTX 20), otherwise in FP32 (GTX 16).",
    }
    yield choice.finding(
        "no",
        RULE,
        f"{target.title} has no BF16 tensor cores: torch emulates BF16 there, yet reports it as supported",
        costs=costs | {"FP32": "no extra code, no speedup"},
        show=(f"ampwise bench {choice.make} --precisions fp32,fp16,bf16", "how BF16 performs on that device"),
        do=instead.get(target.has("fp16")),
        refuses="bf16",
    )
