"""Scores that are subtracted in BF16."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP717",
    name="bf16-cancels",
    severity=Severity.INFO,
    summary="Scores of nearly equal size are subtracted in 16 bits, and the difference is mostly rounding.",
    why=(
        "A difference has the absolute error of what it is made from: two scores near 100 in BF16 are each right to "
        "0.25, so a difference of 0.3 is noise. FP16 has 3 more bits and the same trouble later. The products that "
        "make the scores are not the problem; the scores and their difference are, and they are cheap in FP32."
    ),
    fix="Keep the last layer of each head and the subtraction in FP32: Policy(…).keep('fp32', 'head_a', 'head_b').",
    bad='with torch.autocast("cuda", dtype=torch.bfloat16):\n    tension = compress(x) - particularize(x)',
    good='policy = ampwise.Policy("bf16").keep("fp32", "compress", "particularize")',
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.model.kind == "scorer" and choice.half is not None and choice.want in (None, "fp16", "bf16"):
        bits = {"bf16": "8", "fp16": "11"}[choice.half]
        yield careful(
            RULE,
            choice,
            f"opposed scores are subtracted: with {bits} significant bits a small difference of large scores is "
            "rounding",
            costs={
                "heads in FP32": "next to nothing: they are the last and smallest layers",
                "all in TF32": "one line, and a part of the speed",
                "as it is": "gradients that are noise where the scores nearly agree",
            },
            know=ToKnow(
                f"ampwise compare {choice.subject} --precisions fp32,{choice.half}",
                "whether losses agree within rounding",
            ),
        )
