"""A precision chosen because it is new, or because somebody says so."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.target import Target
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP706",
    name="precision-by-reputation",
    severity=Severity.WARNING,
    summary="A precision is chosen because it is newer, or because somebody says so, not by what the device runs.",
    why=(
        "What a device multiplies fast is a fact of its matrix units, whoever is asked. BF16 is younger than FP16 "
        "and has FP32's range with 8 significant bits; FP16 has 11 bits and ends at 65504. Before Ampere (compute "
        "capability 8.0) there are no units for BF16, and from Ampere on both run at the same rate."
    ),
    fix="Look at the device, then at the model, then measure both.",
    bad="dtype = torch.bfloat16  # FP16 is outdated",
    good="$ ampwise gpu\n$ ampwise compare train:make --precisions fp16,bf16",
)
TFLOPS = 1e12
# Of a device without BF16, by whether there are units for FP16.
OLD_UNITS = {
    True: "has FP16 matrix units and none for BF16",
    False: "has matrix units for neither FP16 nor BF16",
    None: "has no matrix units for BF16",
}


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("bf16-is-newer", "senior-says"):
        yield no(
            RULE,
            choice,
            _fact(choice.target),
            costs={
                "BF16": "8 significant bits, no loss scale"
                + ("; emulated here" if choice.target.emulates_bf16 else ""),
                "FP16": "11 significant bits, a GradScaler, overflow at 65504",
                "asking": "a second for the device, five minutes for both",
            },
            know=ToKnow(
                f"ampwise compare {choice.subject} --precisions fp32,fp16,bf16",
                "which is faster, and that losses agree",
            ),
            do=RULE.fix if choice.half is None else _do(choice.target),
        )


def _fact(target: Target) -> str:
    if target.emulates_bf16:
        return f"newer is not better, whoever says it: {target.title} {OLD_UNITS[target.has('fp16')]}"
    ratio = target.ratio("bf16", "fp16")
    if target.has("bf16") and ratio is not None and ratio.value == 1:
        peak = target.peak("bf16")
        assert peak is not None
        return (
            f"newer is not faster: {target.title} multiplies FP16 and BF16 at the same rate, {peak.show(TFLOPS, 0)} "
            "TFLOP/s dense; what differs is range (65504 or 3.4e38) and significant bits (11 or 8)"
        )
    if target.has("bf16"):
        return f"newer is no reason: {target.title} has BF16 matrix units, which is one; it costs 3 of FP16's 11 bits"
    return "newer is no reason: the device decides, and NVIDIA has BF16 matrix units since Ampere (8.0)"


def _do(target: Target) -> str:
    if target.half == "bf16":
        return (
            "Take BF16 here for its range, not for its age; where bits matter more, FP16 with a GradScaler is as fast."
        )
    return "Take FP16 with a GradScaler here: that is what the matrix units run."
