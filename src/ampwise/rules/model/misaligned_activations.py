"""Products of activations whose rows the matrix units cannot load in whole words."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.products import Products
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP507",
    name="misaligned-activations",
    severity=Severity.INFO,
    summary="Activations are multiplied whose length or batch is not a multiple of 8.",
    why=(
        "Where activations are multiplied with each other, as in attention written by hand, the length of a sequence "
        "is the length of a row in memory. Matrix units read 16-byte words, 8 elements of FP16 or BF16, and rows that "
        "do not begin at such a word are read by slower kernels. It is a matter of speed, not of being right."
    ),
    fix="Pad or cut sequences to a multiple of 8, or use F.scaled_dot_product_attention, which keeps no such matrix.",
    bad="scores = query @ key.transpose(-2, -1)  # 1023 tokens: rows of 1023",
    good="mixed = F.scaled_dot_product_attention(query, key, value)",
)


def check(products: Products) -> Iterator[Finding]:
    for layer in products.layers:
        if layer.kind != "product" or not products.is_worth(layer):
            continue
        off = ", ".join(map(str, layer.off))
        yield RULE.at(
            Place(module=layer.name),
            f"{layer.product.op} of {layer.product.shape}: {off}: {products.cost(layer)}",
            evidence={"product": layer.product.shape, "layers": len(layer.names), "share": products.off_share(layer)},
        )
