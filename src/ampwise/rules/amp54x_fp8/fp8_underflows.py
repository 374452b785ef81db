from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.train.float8.layer_stats import Float8LayerStats

KEEP = "Keep the layer in BF16: `Policy('fp8').keep('bf16', name)`."

RULE = Rule(
    code="AMP541",
    name="fp8-underflows",
    severity=Severity.WARNING,
    summary="An FP8 layer rounds a large fraction of its values to zero at its current scale.",
    why=(
        "A per-tensor scale is set by the tensor's largest value. E4M3 covers 18 powers of two below that, and E5M2 "
        "32: anything smaller becomes zero. A few outliers are enough, and transformer activations have them. The "
        "fraction is of the values that were not zero, counted in a sampled step."
    ),
    fix="Use per-row scales, `Fp8('rowwise')`, or keep the layer in BF16: `Policy('fp8').keep('bf16', name)`.",
    bad='engine = Engine(model, optimizer, "fp8")',
    good='engine = Engine(model, optimizer, ampwise.Policy("fp8").keep("bf16", "blocks.0.down"))',
)

LOST = 0.5  # of the values: the smallest gradients vanish in healthy runs too


def check_float8(layers: Float8LayerStats) -> Findings:
    for operand in layers.operands:
        if operand.flushed_share is not None and operand.flushed_share >= LOST:
            by_row = operand.scale is None  # there is no single scale to report
            yield RULE.at(
                Place(module=operand.layer, step=layers.step),
                f"{operand.flushed_share:.0%} of the nonzero values of its {operand.operand} become zero in "
                f"{operand.fmt.upper()} at {'its per-row scales' if by_row else 'its scale'}",
                evidence=operand.as_dict(),
                fix=KEEP if by_row else None,
            )
