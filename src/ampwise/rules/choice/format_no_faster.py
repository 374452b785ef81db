"""Proposal: use a format that the device supports but does not run faster than a wider one."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP712",
    name="format-no-faster",
    severity=Severity.INFO,
    summary="The device has tensor cores for the format, but they are no faster than those for a wider or safer one.",
    why=(
        "Tensor cores for a format mean that it runs, not that it is faster. GeForce cards run TF32 at the rate of "
        "FP32; Gaudi 3 runs FP8 at the rate of BF16, and FP16 at a quarter of it. The precision is then lost for "
        "nothing."
    ),
    fix="Use the wider format; `ampwise gpu NAME` shows the rates.",
    bad='torch.set_float32_matmul_precision("high")  # on an RTX 3090',
    good="$ ampwise gpu rtx3090",
)
INSTEAD = {"tf32": "fp32", "fp16": "bf16", "fp8": "bf16"}  # the format that each has to beat
TFLOPS = 1e12


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    target, want = choice.target, choice.want
    other = INSTEAD.get(want or "")
    if want is None or other is None or not target.has(want):
        return
    ratio, peak = target.ratio(want, other), target.peak(want)
    # FP16 at the rate of BF16 is fine: it has more bits.
    if ratio is None or peak is None or ratio.value > 1 or (want == "fp16" and ratio.value == 1):
        return
    base = target.peak(other)
    assert base is not None
    fact = (
        f"{target.title} runs {want.upper()} at {peak.show(TFLOPS, 1)} TFLOP/s dense and {other.upper()} at "
        f"{base.show(TFLOPS, 1)}: no speedup"
    )
    costs = {want.upper(): "precision, for no speedup", other.upper(): "nothing"}
    know = SuggestedCommand(
        f"ampwise compare {choice.subject} --precisions {other},{want}", "the speed of whole steps in both formats"
    )
    do = f"Stay with {other.upper()}" + (
        ", or use BF16 for speed." if other == "fp32" and choice.half == "bf16" else "."
    )
    if ratio.approximate:
        yield caution(RULE, choice, fact, costs=costs, know=know, do=do)
    else:
        yield advise_against(RULE, choice, fact, costs=costs, know=know, do=do, refuses=want)
