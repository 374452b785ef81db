"""Matrix products in half precision whose sizes the matrix units cannot load in whole words, as they were compared."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.evidence.speed_command import of_verb
from ampwise.finding import Finding, Place
from ampwise.rules.source.misaligned_dims import RULE
from ampwise.rules.time.misaligned_dims import NAMED, NOTABLE

__all__ = ["RULE", "check"]


def check(speeds: Speeds) -> Iterator[Finding]:
    row = speeds.judged
    if row is None or speeds.device != "cuda":
        return
    work = sum(product.flops for product in row.products)
    off = [product for product in row.products if product.is_half and product.aligned is False]
    share = sum(product.flops for product in off) / work if work else 0.0
    if share >= NOTABLE:
        named = ", ".join(f"{product.op} {product.shape}" for product in off[:NAMED])
        more = f" and {len(off) - NAMED} more" if len(off) > NAMED else ""
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{row.label}: {share:.0%} of the matrix work is in products with a row length that is no multiple of 8: "
            f"{named}{more}",
            evidence={"share": share, "experiment": of_verb(speeds.command, "align", "--device", "--batch")},
        )
