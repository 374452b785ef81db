"""Half-precision matmuls with misaligned sizes, as they ran."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place
from ampwise.rules.evidence.time_use import TimeUse
from ampwise.rules.source.misaligned_dims import RULE

__all__ = ["RULE", "check"]

NOTABLE = 0.05  # of the matmul work
LEAST = 1e9  # FLOPs per step: with less work, the launches take longer
NAMED = 3


def check(use: TimeUse) -> Iterator[Finding]:
    if use.device != "cuda" or use.flops < LEAST * max(use.profiled_steps, 1):
        return
    off = [product for product in use.matmuls if product.is_half and product.aligned is False]
    share = sum(product.flops for product in off) / use.flops
    if share >= NOTABLE:
        named = ", ".join(f"{product.op} {product.shape} ({product.count} times)" for product in off[:NAMED])
        more = f" and {len(off) - NAMED} more" if len(off) > NAMED else ""
        yield RULE.at(
            Place(device=use.device),
            f"{share:.0%} of the matmul work has a row length that is not a multiple of 8: {named}{more}",
            evidence={"share": share, "sizes": len(off), "steps": use.profiled_steps},
        )
