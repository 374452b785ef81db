"""FLOPs that a step computes for each byte that its matmuls read and write."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ampwise.watch.matmul_work import BYTES
from ampwise.watch.time_use import ProfiledMatmul

__all__ = ["intensity_of"]

ENOUGH = 0.5  # of the FLOPs have to be in matmuls of known shape


def intensity_of(products: Iterable[ProfiledMatmul]) -> float | None:
    """Return FLOPs per byte over plain matmuls; None where most of the work is elsewhere, such as in convolutions.

    >>> one = ProfiledMatmul(op="mm", shape="1×4096 @ 4096×4096", precision="bf16", flops=2.0 * 4096**2)
    >>> round(intensity_of([one]), 1)
    1.0
    """
    all_flops = flops = moved = 0.0
    for product in products:
        all_flops += product.flops
        elements = _elements(product.shape)
        if elements is not None:
            flops += product.flops
            moved += product.count * elements * BYTES[product.precision]
    return flops / moved if moved and flops >= ENOUGH * all_flops else None


def _elements(shape: str) -> int | None:
    """Count the elements of both factors and of the product, each read or written once."""
    left, at, right = shape.partition(" @ ")
    if not at:
        return None
    one, other = ([int(size) for size in part.split("×")] for part in (left, right))
    return math.prod(one) + math.prod(other) + math.prod(one[:-1]) * other[-1]
