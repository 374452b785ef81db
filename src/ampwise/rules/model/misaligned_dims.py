"""Layers whose sizes are not 16-byte aligned in a training step."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place
from ampwise.rules.evidence.matmuls import StepMatmuls
from ampwise.rules.source.misaligned_dims import RULE

__all__ = ["RULE", "check"]

FIX = (
    "Pad it, which does not change its results: ampwise.pad_(model), with head= if an embedding produces the logits; "
    "or round the size up where the layer is created."
)


def check(products: StepMatmuls) -> Iterator[Finding]:
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
