"""Proposal: train in BF16 on a device that emulates it."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.hardware.bf16_without_matrix_units import RULE

__all__ = ["RULE", "check"]

# Keyed by whether the device has FP16 tensor cores.
INSTEAD = {
    True: None,
    False: "Train in FP32: there are no FP16 tensor cores either.",
    None: "Train in FP16 with a GradScaler if it has FP16 tensor cores (T4, RTX 20), otherwise in FP32 (GTX 16).",
}


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    target = choice.target
    if choice.want != "bf16" or not target.emulates_bf16:
        return
    costs = {"BF16 here": "emulated matmuls: no faster than FP32, usually slower; 16-bit memory"}
    ratio = target.ratio("fp16", "fp32")
    if target.has("fp16"):
        peak = "" if ratio is None else f"; matmuls at up to {ratio.show(digits=0)}× the FP32 peak"
        costs["FP16"] = f"a GradScaler, and a few steps skipped while it finds its scale{peak}"
    costs["FP32"] = "no extra code, no speedup"
    yield advise_against(
        RULE,
        choice,
        f"{target.title} has no BF16 tensor cores: torch emulates BF16 there, yet reports it as supported",
        costs=costs,
        know=SuggestedCommand(
            f"ampwise compare {choice.subject} --precisions fp32,fp16,bf16", "how BF16 performs on that device"
        ),
        do=INSTEAD[target.has("fp16")],
        refuses="bf16",
    )
