"""Proposal: choose a precision because it is newer or was recommended."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.target import Target

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP706",
    name="precision-by-reputation",
    severity=Severity.WARNING,
    summary="A precision is chosen because it is newer or was recommended, not because of what the device supports.",
    why=(
        "What a device computes fast depends on its tensor cores, not on opinions. BF16 is newer than FP16 and has "
        "the range of FP32 with 8 significant bits; FP16 has 11 bits and ends at 65504. Before Ampere (compute "
        "capability 8.0) there are no BF16 tensor cores; from Ampere on, both run at the same rate."
    ),
    fix="Check the device, then the model, then measure both formats.",
    bad="dtype = torch.bfloat16  # FP16 is outdated",
    good="$ ampwise gpu\n$ ampwise compare train:make --precisions fp16,bf16",
)
TFLOPS = 1e12
# A device without BF16, keyed by whether it has FP16 tensor cores.
OLD_UNITS = {
    True: "has FP16 tensor cores but none for BF16",
    False: "has tensor cores for neither FP16 nor BF16",
    None: "has no BF16 tensor cores",
}


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("bf16-is-newer", "senior-says"):
        yield advise_against(
            RULE,
            choice,
            _fact(choice.target),
            costs={
                "BF16": "8 significant bits, no loss scale"
                + ("; emulated here" if choice.target.emulates_bf16 else ""),
                "FP16": "11 significant bits, a GradScaler, overflow at 65504",
                "checking": "a second for the device, five minutes for both",
            },
            know=SuggestedCommand(
                f"ampwise compare {choice.subject} --precisions fp32,fp16,bf16",
                "which is faster, and whether the losses agree",
            ),
            do=RULE.fix if choice.half is None else _do(choice.target),
        )


def _fact(target: Target) -> str:
    if target.emulates_bf16:
        return f"newer is not better: {target.title} {OLD_UNITS[target.has('fp16')]}"
    ratio = target.ratio("bf16", "fp16")
    if target.has("bf16") and ratio is not None and ratio.value == 1:
        peak = target.peak("bf16")
        assert peak is not None
        return (
            f"newer is not faster: {target.title} runs FP16 and BF16 at the same rate, {peak.show(TFLOPS, 0)} TFLOP/s "
            "dense; they differ in range (65504 and 3.4e38) and significant bits (11 and 8)"
        )
    if target.has("bf16"):
        return (
            f"being newer is no reason, but {target.title} has BF16 tensor cores, which is one; it costs 3 of FP16's "
            "11 bits"
        )
    return "being newer is no reason: the device decides, and NVIDIA has had BF16 tensor cores since Ampere (8.0)"


def _do(target: Target) -> str:
    if target.half == "bf16":
        return "Use BF16 here for its range; where precision matters more, FP16 with a GradScaler is just as fast."
    return "Use FP16 with a GradScaler here: that is what the tensor cores support."
