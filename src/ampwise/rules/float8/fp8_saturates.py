"""FP8 layers whose values are cut off again and again."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.narrow import NarrowLayers
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP540",
    name="fp8-saturates",
    severity=Severity.WARNING,
    summary="Values of an FP8 layer are cut off in many steps, because its scale comes too late for them.",
    why=(
        "Delayed scaling takes the scale from past steps. Where the largest magnitude grows or jumps from step to "
        "step, values lie beyond what E4M3 (448) or E5M2 (57344) hold at that scale, and are cut off there: the "
        "largest activations or gradients, of all. Once in a while that does no harm; again and again it is a clip "
        "that nobody asked for."
    ),
    fix="Take the scale of the moment, `fp8='current'`; or leave room above, `Fp8('delayed', margin=1)`.",
    bad='engine = Engine(model, optimizer, "fp8", fp8="delayed")',
    good='engine = Engine(model, optimizer, "fp8", fp8=ampwise.Fp8("delayed", margin=1))',
)

LEAST = 5  # steps with values cut off: fewer are chance, or the beginning
SHARE = 0.1  # of the steps


def check(layers: NarrowLayers) -> Iterator[Finding]:
    for operand in layers.operands:
        if operand.cut_off_steps >= LEAST and operand.cut_off_share >= SHARE:
            yield RULE.at(
                Place(module=operand.layer, step=layers.step),
                f"values of its {operand.operand} were cut off in {operand.cut_off_steps} of {operand.steps} steps, "
                f"{operand.cut_off_values} in all: its scale in {operand.fmt.upper()} comes too late",
                evidence=operand.as_dict(),
            )
