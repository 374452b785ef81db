"""Convolutions with numbers of channels that the matrix units cannot load in whole words."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.products import Products
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP509",
    name="misaligned-channels",
    severity=Severity.INFO,
    summary="A convolution's number of channels is not a multiple of 8.",
    why=(
        "Convolutions run on matrix units with the channels of a pixel side by side: words of 16 bytes are 8 channels "
        "of FP16 or BF16. With other numbers the library pads copies, or takes slower kernels. The three channels of "
        "an image are another matter: for those there are kernels of their own."
    ),
    fix="Round the number of channels up: 60 to 64, 100 to 104. Use channels_last, in which they lie side by side.",
    bad="conv = nn.Conv2d(60, 100, 3)",
    good="conv = nn.Conv2d(64, 104, 3)",
)


def check(products: Products) -> Iterator[Finding]:
    for layer in products.layers:
        if layer.kind != "convolution" or not products.is_worth(layer):
            continue
        off = ", ".join(map(str, layer.off))
        yield RULE.at(
            Place(module=layer.name),
            f"{off}: {products.cost(layer)}",
            evidence={"product": layer.product.shape, "layers": len(layer.names), "share": products.off_share(layer)},
        )
