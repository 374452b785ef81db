"""Convolutions whose channel counts are not 16-byte aligned."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.matmuls import StepMatmuls

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP509",
    name="misaligned-channels",
    severity=Severity.INFO,
    summary="A convolution's channel count is not a multiple of 8.",
    why=(
        "Convolutions run on tensor cores with the channels of a pixel contiguous: a 16-byte word is 8 channels of "
        "FP16 or BF16. With other counts the library pads copies or uses slower kernels. The three channels of an "
        "image are an exception: there are special kernels for them."
    ),
    fix="Round the channel count up: 60 to 64, 100 to 104. Use channels_last, which makes them contiguous.",
    bad="conv = nn.Conv2d(60, 100, 3)",
    good="conv = nn.Conv2d(64, 104, 3)",
)


def check(products: StepMatmuls) -> Iterator[Finding]:
    for layer in products.layers:
        if layer.kind != "convolution" or not products.is_worth(layer):
            continue
        off = ", ".join(map(str, layer.off))
        yield RULE.at(
            Place(module=layer.name),
            f"{off}: {products.cost(layer)}",
            evidence={"product": layer.product.shape, "layers": len(layer.names), "share": products.off_share(layer)},
        )
