"""A format that the device has units for, and that is no faster there than a wider one."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP712",
    name="format-no-faster",
    severity=Severity.INFO,
    summary="The device has matrix units for the format, and they are no faster than those for a wider or safer one.",
    why=(
        "Units for a format say that it runs, not that it gains. GeForce cards multiply TF32 at the rate of FP32; "
        "Gaudi 3 multiplies FP8 at the rate of BF16, and FP16 at a quarter of it. Bits are then given away for "
        "nothing."
    ),
    fix="Take the wider format; `ampwise gpu NAME` shows the rates.",
    bad='torch.set_float32_matmul_precision("high")  # on an RTX 3090',
    good="$ ampwise gpu rtx3090",
)
INSTEAD = {"tf32": "fp32", "fp16": "bf16", "fp8": "bf16"}  # of each, what it has to be faster than
TFLOPS = 1e12


def check(choice: Choice) -> Iterator[Finding]:
    target, want = choice.target, choice.want
    other = INSTEAD.get(want or "")
    if want is None or other is None or not target.has(want):
        return
    ratio, peak = target.ratio(want, other), target.peak(want)
    # FP16 at the rate of BF16 is no reason against it: it has more bits.
    if ratio is None or peak is None or ratio.value > 1 or (want == "fp16" and ratio.value == 1):
        return
    base = target.peak(other)
    assert base is not None
    fact = (
        f"{target.title} multiplies {want.upper()} at {peak.show(TFLOPS, 1)} TFLOP/s dense and {other.upper()} at "
        f"{base.show(TFLOPS, 1)}: nothing is gained by it"
    )
    costs = {want.upper(): "bits, for no speed", other.upper(): "nothing"}
    know = ToKnow(f"ampwise compare {choice.subject} --precisions {other},{want}", "the two rates, in whole steps")
    do = f"Stay with {other.upper()}" + (
        ", or take BF16 for speed." if other == "fp32" and choice.half == "bf16" else "."
    )
    if ratio.approximate:
        yield careful(RULE, choice, fact, costs=costs, know=know, do=do)
    else:
        yield no(RULE, choice, fact, costs=costs, know=know, do=do, refuses=want)
