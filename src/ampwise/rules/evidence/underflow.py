"""Estimate of what a gradient lost in FP16, from the values that are left.

Under autocast a gradient is computed in FP16, multiplied by the loss scale, and stored in FP32. Values below FP16's
smallest number become exact zeros, indistinguishable from true zeros: unused embedding rows, units switched off by
ReLU. But values just above the limit remain, and how their number falls off towards it indicates how many there must
have been below: an estimate, never more than the number of zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.formats import find_scalar_format

__all__ = ["Underflow", "lost_share", "scale_exponent", "underflow"]

WINDOW = 6  # powers of two above the limit used by the fit: beyond them another part of the tensor may dominate
LEAST = 8  # values in the lowest three of them: with fewer, little is lost and noise would decide
FEW = 0.01  # of all values this near the limit: a fit would change nothing
NEGLIGIBLE = 1e-4  # of the sum below the limit: the remaining terms are smaller still
TRUST = 1000  # values in a power of two above which the fit's own error exceeds sampling noise
MOST = 2.0  # times what is left: if more than two thirds are lost, the visible part says too little
DEPTH = 60  # powers of two below the limit at which every distribution has vanished
HOLE = 0.8  # of halving: the lowest counts must fall this fast to show a gap at zero
HALF = 0.5  # of a power of two: step width of the sum below the limit
HIGHEST = 60.0  # log density: far above any possible count

LN2 = math.log(2)
FP16 = find_scalar_format("fp16")
NORMAL = FP16.lowest_exponent
LIMIT = NORMAL - FP16.mantissa_bits - 1  # at or below this power of two, zero


@dataclass(frozen=True, slots=True)
class Underflow:
    """Effect of FP16 on one gradient at its scale. ``lost`` is an estimate; the other numbers are counted."""

    nonzero: int
    subnormal: int  # nonzero values kept with fewer bits
    lost: float  # rounded to zero
    margin: float | None  # powers of two from the limit up to the median, including lost values; None: no values

    @property
    def values(self) -> float:
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
        margins = [(one.margin, one.values) for one in (self, other) if one.margin is not None]
        weight = sum(values for _, values in margins)
        margin = sum(margin * values for margin, values in margins) / weight if weight else None
        return Underflow(self.nonzero + other.nonzero, self.subnormal + other.subnormal, self.lost + other.lost, margin)


NOTHING = Underflow(0, 0, 0.0, None)


def scale_exponent(scale: float | None) -> int:
    """Return the ``k`` of the loss scale ``2**k``, rounded down; 0 without a scale."""
    return math.frexp(scale)[1] - 1 if scale and math.isfinite(scale) and scale > 0 else 0


def underflow(census: Census, scale: float | None) -> Underflow:
    """Return what a gradient lost in FP16, given its unscaled census at this loss scale.

    >>> underflow(Census(binades={-10: 1000}, zeros=50_000, amax=2**-9.5, amin=2**-9.5), 65536.0).lost
    0.0
    """
    if not census.binades or not census.finite:
        return NOTHING
    k, lowest, nonzero = scale_exponent(scale), min(census.binades), census.nonzeros
    if lowest + k < LIMIT:
        return NOTHING  # values below FP16's smallest: they were never in FP16, so none was lost
    if lowest + k >= NORMAL:
        return Underflow(nonzero, 0, 0.0, _margin(census, nonzero, 0.0, k))
    lost = _lost(census, nonzero, k)
    # The largest subnormal and the smallest normal share a power of two: count it as normal.
    return Underflow(nonzero, census.subnormal("fp16", k).low, lost, _margin(census, nonzero, lost, k))


def lost_share(census: Census, scale: float | None) -> float:
    """Return ``underflow(census, scale).lost_share`` only, for large numbers of censuses.

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
    """Estimate the lost values of a census whose lowest power of two is subnormal in FP16."""
    if not census.zeros:
        return 0.0
    counts = [census.binades.get(LIMIT - k + place, 0) for place in range(WINDOW)]
    return min(_below(counts, nonzero), float(census.zeros), MOST * nonzero)


def _margin(census: Census, nonzero: int, lost: float, k: int) -> float:
    """Return how far the median is above the limit, in powers of two, by linear interpolation."""
    half = (nonzero + lost) / 2
    below = lost
    for exponent, count in sorted(census.binades.items()):
        if below + count >= half:
            return max(0.0, exponent + k - LIMIT + max(0.0, half - below) / count)
        below += count
    return 0.0


# The fit runs for every layer at every sampled step, so the shapes are precomputed and the sums written out.
# Positions are in powers of two above the smallest subnormal, so the limit is at -1.


class _BinDensity(NamedTuple):
    """Density of values in one of the powers of two above the limit."""

    place: int  # index of the power of two, counted from the limit
    excess: float  # log density relative to a density that doubles with each power of two
    weight: float


_Curve = Callable[[int], float]  # log density at one of _STOPS


def _edges() -> tuple[float, ...]:
    """Return the bin edges, shifted by rounding to multiples of the smallest subnormal: 1 now was 0.5 to 1.5 before."""
    return (-1.0, *(math.log2(2.0**place + 0.5) for place in range(WINDOW)))


_EDGES = _edges()
_MIDDLES = [(lower + upper) / 2 for lower, upper in itertools.pairwise(_EDGES)]
_WIDTHS = [upper - lower for lower, upper in itertools.pairwise(_EDGES)]
_STOPS = [-1.0 - HALF * number for number in range(int(DEPTH / HALF) + 1)]  # from the limit downwards


class _DensityShape(NamedTuple):
    """Values of a function at the visible positions, and below the limit."""

    seen: Sequence[float]  # at _MIDDLES
    below: Sequence[float]  # at _STOPS

    @classmethod
    def of(cls, function: Callable[[float], float]) -> _DensityShape:
        return cls([function(at) for at in _MIDDLES], [function(at) for at in _STOPS])


def _even_at_zero(power: float) -> _DensityShape:
    """Return a density that is flat at zero, with a tail like exp(-x**power): 2 is normal, 1 is Laplace."""
    return _DensityShape.of(lambda at: -(2.0 ** (power * at)))


# If the density is flat at zero, each power of two has half as many values as the one above; the deviation further up
# is a shape with a factor to be fitted. In addition there is the log-normal.
_HEAVY_TAIL = _DensityShape.of(lambda at: -math.log1p(2.0**at))
_SHAPES = (*map(_even_at_zero, (0.25, 0.5, 1.0, 2.0)), _HEAVY_TAIL)
_DOUBLING = _DensityShape.of(lambda at: LN2 * at)
_SLOPE, _BEND = _DensityShape.of(lambda at: at), _DensityShape.of(lambda at: -at * at)


def _below(counts: Sequence[int], nonzero: int) -> float:
    """Return how many values were below the limit, estimated from the counts just above it."""
    near = sum(counts[:3])
    if near < LEAST:
        return 0.0
    if near < FEW * nonzero:
        return counts[0] / 2  # as if flat at zero: the limit is at half of the smallest subnormal
    seen = [
        _BinDensity(place, math.log(count / _WIDTHS[place]) - _DOUBLING.seen[place], min(count, TRUST))
        for place, count in enumerate(counts)
        if count
    ]
    curve = _best_curve(seen)
    if curve is None:  # density grows ever faster towards the limit: assume it stays at least constant
        return math.exp(_density(seen[0])) / LN2
    return _sum_below(curve, _steepest(seen, curve))


def _density(one: _BinDensity) -> float:
    return one.excess + _DOUBLING.seen[one.place]


def _best_curve(seen: Sequence[_BinDensity]) -> _Curve | None:
    """Return the best-fitting shape; each parameter counts as two in the sum of squares (AIC)."""
    if len(seen) <= 2:
        return None
    points = _FitPoints.of(seen)
    best: tuple[float, _Curve] | None = None
    for fit in (points.fitted_lognormal(), *[points.fitted(shape) for shape in _SHAPES]):
        if fit is not None and (best is None or fit[0] < best[0]):
            best = fit
    return best and best[1]


class _FitPoints(NamedTuple):
    """Precomputed sums for a fit. Needs at least three points, each with a weight of at least 1, to determine any
    shape.
    """

    points: Sequence[tuple[int, float, float]]  # place, weight, and weight times the deviation from the mean
    weight: float  # of all
    mean: float  # of the excess
    scatter: float  # weighted sum of squares around the mean

    @classmethod
    def of(cls, seen: Sequence[_BinDensity]) -> _FitPoints:
        weight = sum([one.weight for one in seen])
        mean = sum([one.weight * one.excess for one in seen]) / weight
        points = [(one.place, one.weight, one.weight * (one.excess - mean)) for one in seen]
        return cls(points, weight, mean, sum([pull * pull / weight for _, weight, pull in points]))

    def fitted(self, shape: _DensityShape) -> tuple[float, _Curve] | None:
        """Return the misfit of a line that doubles with each power of two, bent by the shape, and the line.

        None if it would grow without bound.
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
        """Return the misfit of a log-normal (a parabola: two unknowns besides the offset), and its curve."""
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


def _steepest(seen: Sequence[_BinDensity], curve: _Curve) -> float:
    """Return how fast the density may fall below the limit: by half per power of two, unless the data falls faster.

    A distribution with its peak at zero never falls faster; one with a gap there, such as the log-normal, shows it.
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
