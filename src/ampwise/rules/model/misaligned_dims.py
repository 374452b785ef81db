"""Layers whose sizes the matrix units cannot load in whole words, as a step of training runs them."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.products import Products
from ampwise.finding import Finding, Place
from ampwise.rules.source.misaligned_dims import RULE

__all__ = ["RULE", "check"]

FIX = (
    "Pad it, which changes nothing that it computes: ampwise.pad_(model), with head= where an embedding makes the "
    "logits; or round the size up where the layer is made."
)


def check(products: Products) -> Iterator[Finding]:
    for layer in products.layers:
        if layer.kind != "linear" or layer.product.precision == "fp8" or not products.is_worth(layer):
            continue
        off = ", ".join(map(str, layer.off))
        yield RULE.at(
            Place(module=layer.name),
            f"{off}: {products.cost(layer)}",
            evidence={"product": layer.product.shape, "layers": len(layer.names), "share": products.off_share(layer)},
            fix=FIX,
        )
