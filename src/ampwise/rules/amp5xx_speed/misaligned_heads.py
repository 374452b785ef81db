from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp5xx_speed.misaligned_layers import misaligned_layers

if TYPE_CHECKING:
    from ampwise.tune.align.matmuls import StepMatmuls

RULE = Rule(
    code="AMP508",
    name="misaligned-heads",
    severity=Severity.INFO,
    summary="The attention head size is not a multiple of 8.",
    why=(
        "The fused kernels of F.scaled_dot_product_attention need a head size that is a multiple of 8. Other sizes "
        "are padded first, with a copy of query, key and value in every layer, or run without the fused kernel, which "
        "materialises the whole score matrix."
    ),
    fix="Choose the width and the number of heads so that the head size is a multiple of 8, such as 64 or 128.",
    bad="attention = nn.MultiheadAttention(embed_dim=780, num_heads=13)  # head size 60",
    good="attention = nn.MultiheadAttention(embed_dim=768, num_heads=12)  # head size 64",
)


def check_matmuls(step: StepMatmuls) -> Findings:
    yield from misaligned_layers(RULE, step, "attention")
