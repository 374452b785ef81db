from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp5xx_speed.misaligned_layers import misaligned_layers

if TYPE_CHECKING:
    from ampwise.tune.align.matmuls import StepMatmuls

RULE = Rule(
    code="AMP507",
    name="misaligned-activations",
    severity=Severity.INFO,
    summary="A matmul of activations has a sequence length or batch size that is not a multiple of 8.",
    why=(
        "When activations are multiplied with each other, as in hand-written attention, the sequence length is the "
        "length of a row in memory. Tensor cores read 16-byte words, 8 elements of FP16 or BF16, and rows that are "
        "not aligned to them need slower kernels. It affects speed, not correctness."
    ),
    fix="Pad or truncate sequences to a multiple of 8, or use F.scaled_dot_product_attention, which does not store "
    "this matrix.",
    bad="scores = query @ key.transpose(-2, -1)  # 1023 tokens: rows of 1023",
    good="mixed = F.scaled_dot_product_attention(query, key, value)",
)


def check_matmuls(step: StepMatmuls) -> Findings:
    yield from misaligned_layers(RULE, step, "product")
