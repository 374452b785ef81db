"""A precision of 16 bits that most of the matrix work is not in, as it was compared."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.finding import Finding, Place
from ampwise.rules.time.little_work_in_half import ENOUGH, NAMED, RULE

__all__ = ["RULE", "check"]


def check(speeds: Speeds) -> Iterator[Finding]:
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
            f"{row.label}: {share:.0%} of the matrix work runs in 16 bits; the largest that does not: {named}",
            evidence={"half_share": share, "experiment": speeds.experiment("--json | jq '.rows[].products'")},
        )
