from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.advise.choice import PrecisionChoice

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
TFLOPS = 1e12


def check_choice(choice: PrecisionChoice) -> Findings:
    target, want = choice.target, choice.want or ""
    other = {"tf32": "fp32", "fp16": "bf16", "fp8": "bf16"}.get(want, "")  # the format that it has to beat
    peak, base = target.peak(want), target.peak(other)
    # FP16 at the rate of BF16 is fine: it has more bits.
    if not target.has(want) or peak is None or base is None or peak.value > base.value:
        return
    if want == "fp16" and peak.value == base.value:
        return
    is_approximate = peak.approximate or base.approximate
    yield choice.finding(
        "careful" if is_approximate else "no",
        RULE,
        f"{target.title} runs {want.upper()} at {peak.show(TFLOPS, 1)} TFLOP/s dense and {other.upper()} at "
        f"{base.show(TFLOPS, 1)}: no speedup",
        costs={want.upper(): "precision, for no speedup", other.upper(): "nothing"},
        show=(
            f"ampwise bench {choice.make} --precisions {other},{want}",
            "the speed of whole steps in both formats",
        ),
        do=f"Stay with {other.upper()}"
        + (", or use BF16 for speed." if other == "fp32" and choice.half == "bf16" else "."),
        refuses=None if is_approximate else want,
    )
