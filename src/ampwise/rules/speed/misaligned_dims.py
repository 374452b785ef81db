"""Half-precision matmuls with misaligned sizes, in a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place
from ampwise.rules.evidence.speed import SpeedComparison
from ampwise.rules.evidence.speed_command import with_command
from ampwise.rules.source.misaligned_dims import RULE
from ampwise.rules.time.misaligned_dims import NAMED, NOTABLE

__all__ = ["RULE", "check"]


def check(speeds: SpeedComparison) -> Iterator[Finding]:
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
            f"{row.label}: {share:.0%} of the matmul work has a row length that is not a multiple of 8: {named}{more}",
            evidence={"share": share, "experiment": with_command(speeds.command, "align", "--device", "--batch")},
        )
