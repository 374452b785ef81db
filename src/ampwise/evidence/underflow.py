"""What FP16 has lost of a gradient, judged by what is left of it.

Under autocast a gradient is computed in FP16, multiplied by the loss scale, and stored in FP32. What fell below
FP16's smallest number is there as an exact zero, among zeros that are honest: rows of an embedding nobody used,
units that ReLU has shut. The two look the same. But values just above the limit are still there, and how their
number falls off towards it says how many there must have been below it: an estimate, and never more than the zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.census.algebra import Census
from ampwise.formats import find_scalar_format

__all__ = ["Underflow", "lost_share", "scale_exponent", "underflow"]

WINDOW = 6  # powers of two above the limit that the fit looks at: beyond them another part of the tensor may rule
LEAST = 8  # values in the lowest three of them: with fewer, what lies below is few too, and noise would decide
FEW = 0.01  # of all values so near the limit: a closer look would change nothing
NEGLIGIBLE = 1e-4  # of the sum below the limit: what follows is less and less
TRUST = 1000  # values in a power of two beyond which a fit's own error outweighs chance
MOST = 2.0  # times what is left: beyond two thirds lost, the part that is seen says too little
DEPTH = 60  # powers of two below the limit, where nothing is left of any distribution
HOLE = 0.8  # of halving: so fast must the lowest counts fall, wide as their powers of two are, to show a hole at zero
HALF = 0.5  # of a power of two: the stride of the sum below the limit
HIGHEST = 60.0  # logarithm of a density: far more than there are values

LN2 = math.log(2)
FP16 = find_scalar_format("fp16")
NORMAL = FP16.lowest_exponent
LIMIT = NORMAL - FP16.mantissa_bits - 1  # at or below this power of two, zero


@dataclass(frozen=True, slots=True)
class Underflow:
    """What FP16 did to one gradient at the scale it had. ``lost`` is an estimate, the rest is counted."""

    nonzero: int
    subnormal: int  # of them: kept, with fewer bits
    lost: float  # turned to zero
    margin: float | None  # powers of two from the limit up to the median, lost values included; None: nothing there

    @property
    def values(self) -> float:
        """What would not be zero in wider arithmetic."""
        return self.nonzero + self.lost

    @property
    def lost_share(self) -> float:
        return self.lost / self.values if self.values else 0.0

    @property
    def subnormal_share(self) -> float:
        return self.subnormal / self.values if self.values else 0.0

    @property
    def share(self) -> float:
        """Lost or with fewer bits."""
        return self.lost_share + self.subnormal_share

    def __add__(self, other: Underflow) -> Underflow:
        margins = [(one.margin, one.values) for one in (self, other) if one.margin is not None]
        weight = sum(values for _, values in margins)
        margin = sum(margin * values for margin, values in margins) / weight if weight else None
        return Underflow(self.nonzero + other.nonzero, self.subnormal + other.subnormal, self.lost + other.lost, margin)


NOTHING = Underflow(0, 0, 0.0, None)


def scale_exponent(scale: float | None) -> int:
    """The ``k`` of the loss scale ``2**k``, rounded down; 0 without one."""
    return math.frexp(scale)[1] - 1 if scale and math.isfinite(scale) and scale > 0 else 0


def underflow(census: Census, scale: float | None) -> Underflow:
    """What FP16 lost of a gradient whose census, in true units, was taken at this loss scale.

    >>> underflow(Census(binades={-10: 1000}, zeros=50_000, amax=2**-9.5, amin=2**-9.5), 65536.0).lost
    0.0
    """
    if not census.binades or not census.finite:
        return NOTHING
    k, lowest, nonzero = scale_exponent(scale), min(census.binades), census.nonzeros
    if lowest + k < LIMIT:
        return NOTHING  # values below FP16's smallest: they never were in FP16, and none was lost
    if lowest + k >= NORMAL:
        return Underflow(nonzero, 0, 0.0, _margin(census, nonzero, 0.0, k))
    lost = _lost(census, nonzero, k)
    # The largest subnormal and the smallest normal share a power of two: in doubt, no bits were lost.
    return Underflow(nonzero, census.subnormal("fp16", k).low, lost, _margin(census, nonzero, lost, k))


def lost_share(census: Census, scale: float | None) -> float:
    """``underflow(census, scale).lost_share``, without what else it counts: for maps of very many censuses.

    >>> lost_share(Census(binades={-41: 60, -40: 60, -39: 60}, zeros=120, amax=2**-38.5, amin=2**-40.5), 65536.0) > 0.1
    True
    """
    if not census.binades or not census.finite:
        return 0.0
    k, nonzero = scale_exponent(scale), census.nonzeros
    if not LIMIT <= min(census.binades) + k < NORMAL:
        return 0.0
    lost = _lost(census, nonzero, k)
    return lost / (nonzero + lost)


def _lost(census: Census, nonzero: int, k: int) -> float:
    """An estimate, for a census whose lowest power of two is a subnormal one in FP16."""
    if not census.zeros:
        return 0.0
    counts = [census.binades.get(LIMIT - k + place, 0) for place in range(WINDOW)]
    return min(_below(counts, nonzero), float(census.zeros), MOST * nonzero)


def _margin(census: Census, nonzero: int, lost: float, k: int) -> float:
    """How far the median lies above the limit, in powers of two, by the line between two edges."""
    half = (nonzero + lost) / 2
    below = lost
    for exponent, count in sorted(census.binades.items()):
        if below + count >= half:
            return max(0.0, exponent + k - LIMIT + max(0.0, half - below) / count)
        below += count
    return 0.0


# The fit, for every layer at every sampled step: shapes are known beforehand wherever they are asked for, and the sums
# are written out. Positions are in powers of two above the smallest subnormal, so that the limit is at -1.


class _Seen(NamedTuple):
    """How dense values are in one of the powers of two above the limit."""

    place: int  # which, from the limit on
    excess: float  # the logarithm of their density over that of twice as many for each power of two
    weight: float


_Curve = Callable[[int], float]  # the logarithm of the density, at one of _STOPS


def _edges() -> tuple[float, ...]:
    """Rounding to a multiple of the smallest subnormal moves them: what is 1 now was 0.5 to 1.5 of it."""
    return (-1.0, *(math.log2(2.0**place + 0.5) for place in range(WINDOW)))


_EDGES = _edges()
_MIDDLES = [(lower + upper) / 2 for lower, upper in itertools.pairwise(_EDGES)]
_WIDTHS = [upper - lower for lower, upper in itertools.pairwise(_EDGES)]
_STOPS = [-1.0 - HALF * number for number in range(int(DEPTH / HALF) + 1)]  # from the limit downwards


class _Shape(NamedTuple):
    """What a function is where values are seen, and below the limit."""

    seen: Sequence[float]  # at _MIDDLES
    below: Sequence[float]  # at _STOPS

    @classmethod
    def of(cls, function: Callable[[float], float]) -> _Shape:
        return cls([function(at) for at in _MIDDLES], [function(at) for at in _STOPS])


def _even_at_zero(power: float) -> _Shape:
    """Small values as likely as smaller ones, and a tail like exp(-x**power): 2 is normal, 1 is Laplace."""
    return _Shape.of(lambda at: -(2.0 ** (power * at)))


# Where small values are as likely as smaller ones, each power of two has half as many as the one above; how that
# bends further up is a shape with a factor to be fitted. Besides these there is the log-normal.
_HEAVY_TAIL = _Shape.of(lambda at: -math.log1p(2.0**at))
_SHAPES = (*map(_even_at_zero, (0.25, 0.5, 1.0, 2.0)), _HEAVY_TAIL)
_DOUBLING = _Shape.of(lambda at: LN2 * at)
_SLOPE, _BEND = _Shape.of(lambda at: at), _Shape.of(lambda at: -at * at)


def _below(counts: Sequence[int], nonzero: int) -> float:
    """How many values lay below the limit, by the counts of the powers of two just above it."""
    near = sum(counts[:3])
    if near < LEAST:
        return 0.0
    if near < FEW * nonzero:
        return counts[0] / 2  # as if even at zero: the limit is at half of what is rounded to 1
    seen = [
        _Seen(place, math.log(count / _WIDTHS[place]) - _DOUBLING.seen[place], min(count, TRUST))
        for place, count in enumerate(counts)
        if count
    ]
    curve = _best_curve(seen)
    if curve is None:  # denser and denser towards the limit at a growing pace: as even as at the limit, at least
        return math.exp(_density(seen[0])) / LN2
    return _sum_below(curve, _steepest(seen, curve))


def _density(one: _Seen) -> float:
    return one.excess + _DOUBLING.seen[one.place]


def _best_curve(seen: Sequence[_Seen]) -> _Curve | None:
    """The shape that fits best, each parameter of it counted as two in the sum of squares (Akaike's measure)."""
    if len(seen) <= 2:
        return None
    points = _Points.of(seen)
    best: tuple[float, _Curve] | None = None
    for fit in (points.fitted_lognormal(), *[points.fitted(shape) for shape in _SHAPES]):
        if fit is not None and (best is None or fit[0] < best[0]):
            best = fit
    return best and best[1]


class _Points(NamedTuple):
    """What a fit asks of the points that are seen. At least three of them, each with a weight of at least 1: they
    decide any shape."""

    points: Sequence[tuple[int, float, float]]  # the place, the weight, and the weight times what is above the mean
    weight: float  # of all
    mean: float  # of the excess
    scatter: float  # sum of weighted squares around the mean

    @classmethod
    def of(cls, seen: Sequence[_Seen]) -> _Points:
        weight = sum([one.weight for one in seen])
        mean = sum([one.weight * one.excess for one in seen]) / weight
        points = [(one.place, one.weight, one.weight * (one.excess - mean)) for one in seen]
        return cls(points, weight, mean, sum([pull * pull / weight for _, weight, pull in points]))

    def fitted(self, shape: _Shape) -> tuple[float, _Curve] | None:
        """How badly a line of twice as many for each power of two, bent by the shape, fits; and the line.

        None where it would grow without end.
        """
        x_sum = xx = xy = 0.0
        for place, weight, pull in self.points:
            x = shape.seen[place]
            x_sum += weight * x
            xx += weight * x * x
            xy += pull * x
        factor = xy / (xx - x_sum * x_sum / self.weight)
        if factor < 0:
            return None
        start, below = self.mean - factor * x_sum / self.weight, shape.below
        return self.scatter - factor * xy + 2 * 2, lambda stop: start + _DOUBLING.below[stop] + factor * below[stop]

    def fitted_lognormal(self) -> tuple[float, _Curve] | None:
        """The same for a parabola: two unknowns besides the start."""
        if len(self.points) <= 3:
            return None
        x_sum = z_sum = xx = xz = zz = xy = zy = 0.0
        for place, weight, pull in self.points:
            x, z = _SLOPE.seen[place], _BEND.seen[place]
            x_sum += weight * x
            z_sum += weight * z
            xx += weight * x * x
            xz += weight * x * z
            zz += weight * z * z
            xy += pull * x
            zy += pull * z
        xx, xz, zz = (
            xx - x_sum * x_sum / self.weight,
            xz - x_sum * z_sum / self.weight,
            zz - z_sum * z_sum / self.weight,
        )
        determinant = xx * zz - xz * xz
        slope, bend = (xy * zz - zy * xz) / determinant, (zy * xx - xy * xz) / determinant
        if bend < 0:
            return None
        start, slope_here = self.mean - (slope * x_sum + bend * z_sum) / self.weight, slope + LN2
        misfit = self.scatter - slope * xy - bend * zy + 2 * 3
        return misfit, lambda stop: start + slope_here * _STOPS[stop] + bend * _BEND.below[stop]


def _steepest(seen: Sequence[_Seen], curve: _Curve) -> float:
    """How fast the density may fall below the limit: by half for each power of two, unless it is seen to fall faster.

    A distribution with its peak at zero never falls faster; one that has a hole there, as the log-normal, shows it.
    """
    lowest, next_ = seen[:2]
    shown = (_density(next_) - _density(lowest)) / (_MIDDLES[next_.place] - _MIDDLES[lowest.place])
    at_limit = (curve(0) - curve(1)) / HALF
    return math.inf if shown > HOLE * LN2 and at_limit > 1.5 * LN2 else max(LN2, shown)


def _sum_below(curve: _Curve, steepest: float) -> float:
    steepest_fall = steepest * HALF
    total, here = 0.0, curve(0)
    density = here
    for stop in range(1, len(_STOPS)):
        below = curve(stop)
        fall = here - below
        if fall > steepest_fall:
            fall = steepest_fall
        height = density - fall / 2
        part = HALF * math.exp(height if height < HIGHEST else HIGHEST)
        total += part
        if part < NEGLIGIBLE * total:
            break
        density -= fall
        here = below
    return total
