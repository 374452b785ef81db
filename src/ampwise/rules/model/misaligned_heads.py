"""Attention with heads whose size the fused kernels do not take."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.products import Products
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP508",
    name="misaligned-heads",
    severity=Severity.INFO,
    summary="Attention's heads have a size that is not a multiple of 8.",
    why=(
        "The fused kernels of F.scaled_dot_product_attention take heads whose size is a multiple of 8. Others are "
        "padded first, with a copy of query, key and value in every layer, or run without the fused kernel, which "
        "writes out the whole matrix of scores."
    ),
    fix="Choose width and number of heads such that the one divided by the other is a multiple of 8: 64 or 128.",
    bad="attention = nn.MultiheadAttention(embed_dim=780, num_heads=13)  # heads of 60",
    good="attention = nn.MultiheadAttention(embed_dim=768, num_heads=12)  # heads of 64",
)


def check(products: Products) -> Iterator[Finding]:
    for layer in products.layers:
        if layer.kind == "attention" and products.is_worth(layer):
            yield RULE.at(
                Place(module=layer.name),
                f"{', '.join(map(str, layer.off))}: {products.cost(layer)}",
                evidence={
                    "product": layer.product.shape,
                    "layers": len(layer.names),
                    "share": products.off_share(layer),
                },
            )
