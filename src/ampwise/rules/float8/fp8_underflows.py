"""FP8 layers that round much of what they are given to zero."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.narrow import NarrowLayers
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

KEEP = "Keep the layer wide: `Policy('fp8').keep('bf16', name)`."

RULE = Rule(
    code="AMP541",
    name="fp8-underflows",
    severity=Severity.WARNING,
    summary="An FP8 layer rounds a large share of its values to zero at the scale it has.",
    why=(
        "One scale for a whole tensor is set by its largest value. E4M3 holds 18 powers of two below that, and E5M2 "
        "32: what is smaller becomes zero. A few outliers are enough for that, as activations of transformers have "
        "them. The share is of the values that were not zero, counted in a step that was sampled."
    ),
    fix="Use a scale for each row, `fp8='rowwise'`; or keep the layer wide: `Policy('fp8').keep('bf16', name)`.",
    bad='engine = Engine(model, optimizer, "fp8")',
    good='engine = Engine(model, optimizer, ampwise.Policy("fp8").keep("bf16", "blocks.0.down"))',
)

LOST = 0.5  # of the values: tails of tiny gradients vanish in healthy runs, too


def check(layers: NarrowLayers) -> Iterator[Finding]:
    for operand in layers.operands:
        if operand.flushed_share is not None and operand.flushed_share >= LOST:
            by_row = operand.scale is None  # so that there is no one scale to tell
            yield RULE.at(
                Place(module=operand.layer, step=layers.step),
                f"{operand.flushed_share:.0%} of the values of its {operand.operand} that are not zero become zero in "
                f"{operand.fmt.upper()} at {'the scales of its rows' if by_row else 'its scale'}",
                evidence=operand.as_dict(),
                fix=KEEP if by_row else None,
            )
