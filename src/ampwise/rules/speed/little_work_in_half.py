"""A 16-bit precision that most of the matmul work does not run in, in a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place
from ampwise.rules.evidence.speed import SpeedComparison
from ampwise.rules.time.little_work_in_half import ENOUGH, NAMED, RULE

__all__ = ["RULE", "check"]


def check(speeds: SpeedComparison) -> Iterator[Finding]:
    row = speeds.judged
    work = 0.0 if row is None else sum(product.flops for product in row.products)
    if row is None or not work:
        return
    wide = [product for product in row.products if not product.is_half]
    share = 1 - sum(product.flops for product in wide) / work
    if share < ENOUGH:
        named = ", ".join(f"{product.op} {product.shape} in {product.precision.upper()}" for product in wide[:NAMED])
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{row.label}: {share:.0%} of the matmul work runs in 16-bit; the largest exceptions: {named}",
            evidence={"half_share": share, "experiment": speeds.experiment("--json | jq '.rows[].products'")},
        )
