"""A step at other batch sizes, from its logs at two: nearly every tensor's size is a constant plus so much a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ampwise.tune.memory.log import Log

__all__ = ["Affine", "affine", "largest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """The log of a step of any batch size."""

    log: Log  # at ``batch``
    batch: int
    slopes: tuple[int, ...]  # bytes a row, of each block

    def at(self, batch: int) -> Log:
        more = batch - self.batch
        sizes = (max(0, size + slope * more) for size, slope in zip(self.log.sizes, self.slopes, strict=True))
        return replace(self.log, sizes=tuple(sizes))


def affine(first: Log, second: Log, *, batches: tuple[int, int]) -> Affine | None:
    """From logs at two sizes; None where the two steps are not made of the same operations."""
    if (first.events, first.kinds) != (second.events, second.kinds):
        return None
    rows = batches[1] - batches[0]
    slopes = tuple((b - a) // rows for a, b in zip(first.sizes, second.sizes, strict=True))
    return Affine(log=first, batch=batches[0], slopes=slopes)


def largest(fits: Callable[[int], bool], most: int, start: int = 1) -> int:
    """The largest number up to ``most`` that fits, if all smaller ones do; 0 if none does. ``start`` is a guess.

    >>> largest(lambda batch: batch <= 37, 1000)
    37
    """
    low, high = 0, most + 1  # the largest that is known to fit, and the smallest that is not
    size = min(start, most)
    while high - low > 1:
        low, high = (size, high) if fits(size) else (low, size)
        size = min(2 * low, most) if high > most else (low + high) // 2
    return low
