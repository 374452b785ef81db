"""Scores that are subtracted in BF16 or FP16."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP717",
    name="bf16-cancels",
    severity=Severity.INFO,
    summary="Scores of nearly equal size are subtracted in 16-bit, and the difference is mostly rounding error.",
    why=(
        "A difference inherits the absolute error of its operands: two scores near 100 in BF16 are each accurate to "
        "0.25, so a difference of 0.3 is noise. FP16 has 3 more bits, which only delays the problem. The matmuls that "
        "produce the scores are fine; the scores and their difference are not, and those are cheap in FP32."
    ),
    fix="Keep the last layer of each head and the subtraction in FP32: Policy(…).keep('fp32', 'head_a', 'head_b').",
    bad='with torch.autocast("cuda", dtype=torch.bfloat16):\n    tension = compress(x) - particularize(x)',
    good='policy = ampwise.Policy("bf16").keep("fp32", "compress", "particularize")',
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.model.kind == "scorer" and choice.half is not None and choice.want in (None, "fp16", "bf16"):
        bits = {"bf16": "8", "fp16": "11"}[choice.half]
        yield caution(
            RULE,
            choice,
            f"opposed scores are subtracted: with {bits} significant bits, a small difference of large scores is "
            "rounding error",
            costs={
                "heads in FP32": "almost nothing: they are the last and smallest layers",
                "all in TF32": "one line, and part of the speed",
                "as it is": "noisy gradients where the scores nearly agree",
            },
            know=SuggestedCommand(
                f"ampwise compare {choice.subject} --precisions fp32,{choice.half}",
                "whether the losses agree within rounding",
            ),
        )
