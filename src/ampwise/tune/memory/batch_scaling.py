"""Extrapolate a step to other batch sizes from its logs at two: nearly every size is a constant plus bytes per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ampwise.tune.memory.allocation_log import AllocationLog

__all__ = ["Affine", "fit_affine", "largest_fitting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """The log of a step at any batch size."""

    log: AllocationLog  # at ``batch``
    batch: int
    slopes: tuple[int, ...]  # bytes per row, for each block

    def at(self, batch: int) -> AllocationLog:
        more = batch - self.batch
        sizes = (max(0, size + slope * more) for size, slope in zip(self.log.sizes, self.slopes, strict=True))
        return replace(self.log, sizes=tuple(sizes))


def fit_affine(first: AllocationLog, second: AllocationLog, *, batches: tuple[int, int]) -> Affine | None:
    """Fit logs at two sizes; None if the two steps do not consist of the same operations."""
    if (first.events, first.kinds) != (second.events, second.kinds):
        return None
    rows = batches[1] - batches[0]
    slopes = tuple((b - a) // rows for a, b in zip(first.sizes, second.sizes, strict=True))
    return Affine(log=first, batch=batches[0], slopes=slopes)


def largest_fitting(fits: Callable[[int], bool], most: int, start: int = 1) -> int:
    """Return the largest number up to ``most`` that fits, if all smaller ones do; 0 if none does. ``start`` is a guess.

    >>> largest_fitting(lambda batch: batch <= 37, 1000)
    37
    """
    low, high = 0, most + 1  # the largest known to fit, and the smallest known not to
    size = min(start, most)
    while high - low > 1:
        low, high = (size, high) if fits(size) else (low, size)
        size = min(2 * low, most) if high > most else (low + high) // 2
    return low
