from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.align.matmuls import StepMatmuls

RULE = Rule(
    code="AMP510",
    name="fp8-misaligned",
    severity=Severity.WARNING,
    summary="A layer's size is not a multiple of 16, so it cannot run in FP8.",
    why=(
        "The FP8 matmul, torch._scaled_mm, requires sizes that are multiples of 16: this is a requirement, not a "
        "matter of speed. Libraries leave layers of other sizes in BF16, or fail."
    ),
    fix="Pad it, which does not change its results: ampwise.pad_(model, precision='fp8'), or round its size up.",
    bad="head = nn.Linear(768, 50257)",
    good="head = nn.Linear(768, 50304)",
)


def check_matmuls(products: StepMatmuls) -> Findings:
    for layer in products.layers:
        if layer.product.precision == "fp8" and layer.off:
            off = ", ".join(map(str, layer.off))
            yield RULE.at(
                Place(module=layer.name),
                f"{off}: {products.share(layer):.1%} of the matmul work cannot run in FP8",
                evidence={"product": layer.product.shape, "layers": len(layer.names), "share": products.share(layer)},
            )
