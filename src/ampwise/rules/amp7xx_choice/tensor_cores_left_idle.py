from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.advise.choice import PrecisionChoice

RULE = Rule(
    code="AMP711",
    name="tensor-cores-left-idle",
    severity=Severity.INFO,
    summary="FP32 is requested on a device whose tensor cores run 16-bit formats many times faster.",
    why=(
        "FP32 matmuls run on the regular cores, at a fraction of the tensor cores' rate. Where 16-bit precision is "
        "enough, it takes a few lines: autocast, plus a GradScaler for FP16. Where it is not, TF32 takes one line and "
        "keeps the range of FP32."
    ),
    fix="Measure 16-bit and TF32 against FP32 before ruling them out.",
    bad='engine = ampwise.Engine(model, optimizer, "fp32")',
    good='engine = ampwise.Engine(model, optimizer, "auto")',
)


def check_choice(choice: PrecisionChoice) -> Findings:
    half = choice.target.half
    costs = {"FP32": "the speed of the tensor cores"}
    if choice.target.tf32_gains:
        costs["TF32"] = "one line, FP32's range, 10 mantissa bits"
    if half != "bf16":
        costs["FP16"] = "a `with` block and a GradScaler"
    if half != "fp16":
        costs["BF16"] = "a `with` block, 8 significant bits"
    show = f"ampwise bench {choice.make}", "whole-step times in every precision that the device supports"
    if choice.proposes("too-complex") and (half is not None or not choice.target.known):
        fact = (
            "mixed precision is one `with` block, plus four lines for the GradScaler in FP16; Engine(model, optimizer) "
            "is the whole step"
        )
        do = "Paste the code below; `ampwise check` then checks your version of it."
        yield choice.finding("no", RULE, fact, costs=costs, show=show, do=do)
    elif choice.want == "fp32" and half is not None and choice.model.small is False:
        gain = choice.gain(half)
        faster = "" if gain is None else f": {gain.text} over {gain.over.upper()} is possible (derived)"
        fact = f"FP32 leaves the {half.upper()} tensor cores idle{faster}"
        yield choice.finding("careful", RULE, fact, costs=costs, show=show)
