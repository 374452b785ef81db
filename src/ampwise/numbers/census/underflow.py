"""What FP16 lost of a gradient, counted from the values that are left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.formats import find_scalar_format

FP16 = find_scalar_format("fp16")
FLUSHED = FP16.lowest_exponent - FP16.mantissa_bits - 1  # magnitudes up to this power of two become zero


@dataclass(frozen=True, slots=True)
class Underflow:
    """Effect of FP16 on one gradient at its loss scale; ``lost`` is a lower bound, the rest is counted."""

    nonzero: int = 0
    subnormal: int = 0  # nonzero values kept with fewer bits
    lost: int = 0  # values rounded to zero, at least

    @property
    def values(self) -> int:
        """Values that would be nonzero at higher precision."""
        return self.nonzero + self.lost

    @property
    def lost_share(self) -> float:
        return self.lost / self.values if self.values else 0.0

    @property
    def subnormal_share(self) -> float:
        return self.subnormal / self.values if self.values else 0.0

    @property
    def share(self) -> float:
        """Fraction of values that are lost or have fewer bits."""
        return self.lost_share + self.subnormal_share

    def __add__(self, other: Underflow) -> Underflow:
        return Underflow(self.nonzero + other.nonzero, self.subnormal + other.subnormal, self.lost + other.lost)


NO_UNDERFLOW = Underflow()


def scale_exponent(scale: float | None) -> int:
    """Return the ``k`` of the loss scale ``2**k``, rounded down; 0 without a scale."""
    return math.frexp(scale)[1] - 1 if scale and math.isfinite(scale) and scale > 0 else 0


def underflow(census: Census, scale: float | None) -> Underflow:
    """Return what a gradient lost in FP16, given its unscaled census at this loss scale.

    Lost values are zeros like any other: unused embedding rows, units switched off by ReLU. But FP16's smallest number
    u holds what was between 0.5 u and 1.5 u. If values do not thin out there, at least half as many were in the 0.5 u
    below it (and no more than there are zeros). If they do, with more than twice as many at 2 u as at u, none is
    counted as lost.

    >>> underflow(Census(binades={-41: 60, -40: 60, -26: 60}, zeros=500, amax=2**-25.5, amin=2**-40), 65536.0)
    Underflow(nonzero=180, subnormal=120, lost=30)
    """
    if not census.binades or not census.finite:
        return NO_UNDERFLOW
    k = scale_exponent(scale)
    lowest = min(census.binades) + k
    if lowest < FLUSHED:
        return NO_UNDERFLOW  # values below FP16's smallest: they were never in FP16, so none was lost
    if lowest >= FP16.lowest_exponent:
        return Underflow(census.nonzeros)
    at_smallest, above = census.binades.get(FLUSHED - k, 0), census.binades.get(FLUSHED - k + 1, 0)
    thins_out = above > 2 * at_smallest  # those at 2 u: as many as at u where the density is even
    lost = 0 if thins_out else min(at_smallest // 2, census.zeros)
    # The largest subnormal and the smallest normal share a power of two: count it as normal.
    return Underflow(census.nonzeros, census.subnormal("fp16", k).low, lost)
