"""Autocast that leaves most of the matrix work in FP32."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.timing import TimeUse
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP504",
    name="little-work-in-half",
    severity=Severity.WARNING,
    summary="Autocast is on, and less than half of the matrix work runs in half precision.",
    why=(
        "Autocast is there for the matrix products: in FP16 and BF16 they run many times faster than in FP32. It "
        "reaches what is called inside its region, in the same thread. A model called outside it, a region that was "
        "switched off, inputs of custom operators and `.float()` before a product all stay in FP32."
    ),
    fix="Put the model's whole forward pass and the loss inside autocast, and take out casts to FP32 before products.",
    bad=(
        'features = backbone(x)\nwith torch.autocast("cuda", dtype=torch.bfloat16):\n'
        "    loss = criterion(head(features), y)"
    ),
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = criterion(head(backbone(x)), y)',
)
ENOUGH = 0.5
LEAST = 1e9  # FLOPs a step, below which no precision is fast
NAMED = 3


def check(use: TimeUse) -> Iterator[Finding]:
    share = use.half_share
    if use.device != "cuda" or use.autocast is None or share is None or share >= ENOUGH:
        return
    if use.flops < LEAST * max(use.profiled_steps, 1):
        return
    wide = [product for product in use.matrix_products if not product.is_half]
    named = ", ".join(f"{product.op} {product.shape} in {product.precision.upper()}" for product in wide[:NAMED])
    yield RULE.at(
        Place(device=use.device),
        f"autocast to {use.autocast.upper()} is on, and {share:.0%} of the matrix work runs in half precision; "
        f"the largest that does not: {named}",
        evidence={"half_share": share, "flops_by_precision": dict(use.flops_by_precision)},
    )
