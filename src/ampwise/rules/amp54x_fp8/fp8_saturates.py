from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.train.float8.layer_stats import Float8LayerStats

RULE = Rule(
    code="AMP540",
    name="fp8-saturates",
    severity=Severity.WARNING,
    summary="Values of an FP8 layer saturate in many steps, because its scale lags behind them.",
    why=(
        "Delayed scaling derives the scale from past steps. When the largest magnitude grows or jumps between steps, "
        "values exceed what E4M3 (448) or E5M2 (57344) can hold at that scale and are clipped: the largest activations "
        "or gradients of all. Now and then that is harmless; repeated, it is unintended clipping."
    ),
    fix="Use the current scale, `Fp8('current')`, or leave headroom, `Fp8('delayed', margin=1)`.",
    bad='engine = Engine(model, optimizer, ampwise.Fp8("delayed"))',
    good='engine = Engine(model, optimizer, ampwise.Fp8("delayed", margin=1))',
)

LEAST = 5  # saturated steps: fewer are chance, or the start of training
SHARE = 0.1  # of the steps


def check_float8(layers: Float8LayerStats) -> Findings:
    for operand in layers.operands:
        if operand.cut_off_steps >= LEAST and operand.cut_off_share >= SHARE:
            yield RULE.at(
                Place(module=operand.layer, step=layers.step),
                f"values of its {operand.operand} saturated in {operand.cut_off_steps} of {operand.steps} steps, "
                f"{operand.cut_off_values} values in total: its {operand.fmt.upper()} scale lags behind",
                evidence=operand.as_dict(),
            )
