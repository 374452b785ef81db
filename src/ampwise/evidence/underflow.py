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

from ampwise.census.algebra import Census
from ampwise.formats import find_scalar_format

__all__ = ["Underflow", "scale_exponent", "underflow"]

WINDOW = 6  # powers of two above the limit that the fit looks at: beyond them another part of the tensor may rule
LEAST = 8  # values in the lowest three of them: with fewer, what lies below is few too, and noise would decide
FEW = 0.01  # of all values so near the limit: a closer look would change nothing
NEGLIGIBLE = 1e-4  # of the sum below the limit: what follows is less and less
TRUST = 1000  # values in a power of two beyond which a fit's own error outweighs chance
MOST = 2.0  # times what is left: beyond two thirds lost, the part that is seen says too little
DEPTH = 60  # powers of two below the limit, where nothing is left of any distribution
HOLE = 0.8  # of halving: so fast must the lowest counts fall, wide as their powers of two are, to show a hole at zero
HALF = 0.5  # of a power of two: the stride of the sum below the limit

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
    counts = [census.binades.get(LIMIT - k + place, 0) for place in range(WINDOW)]
    lost = min(_below(counts, nonzero), float(census.zeros), MOST * nonzero) if census.zeros else 0.0
    # The largest subnormal and the smallest normal share a power of two: in doubt, no bits were lost.
    return Underflow(nonzero, census.subnormal("fp16", k).low, lost, _margin(census, nonzero, lost, k))


def _margin(census: Census, nonzero: int, lost: float, k: int) -> float:
    """How far the median lies above the limit, in powers of two, by the line between two edges."""
    half = (nonzero + lost) / 2
    below = lost
    for exponent, count in sorted(census.binades.items()):
        if below + count >= half:
            return max(0.0, exponent + k - LIMIT + max(0.0, half - below) / count)
        below += count
    return 0.0


# The fit. Positions are in powers of two above the smallest subnormal, so that the limit is at -1.


@dataclass(frozen=True, slots=True)
class _Seen:
    """How dense values are at a position: the logarithm of their number in a power of two."""

    at: float
    density: float
    weight: float


_Curve = Callable[[float], float]


def _even_at_zero(power: float) -> _Curve:
    """Small values as likely as smaller ones, and a tail like exp(-x**power): 2 is normal, 1 is Laplace."""
    return lambda at: -(2.0 ** (power * at))


def _heavy_tail(at: float) -> float:
    return -math.log1p(2.0**at)


# Where small values are as likely as smaller ones, each power of two has half as many as the one above; how that
# bends further up is a shape with a factor to be fitted. Besides these there is the log-normal.
_SHAPES: tuple[_Curve, ...] = (*map(_even_at_zero, (0.25, 0.5, 1.0, 2.0)), _heavy_tail)


def _below(counts: Sequence[int], nonzero: int) -> float:
    """How many values lay below the limit, by the counts of the powers of two just above it."""
    near = sum(counts[:3])
    if near < LEAST:
        return 0.0
    if near < FEW * nonzero:
        return counts[0] / 2  # as if even at zero: the limit is at half of what is rounded to 1
    seen = _densities(counts)
    curve = _best_curve(seen)
    if curve is None:  # denser and denser towards the limit at a growing pace: as even as at the limit, at least
        return math.exp(seen[0].density) / LN2
    return _sum_below(curve, _steepest(seen, curve))


def _edges() -> tuple[float, ...]:
    """Rounding to a multiple of the smallest subnormal moves them: what is 1 now was 0.5 to 1.5 of it."""
    return (-1.0, *(math.log2(2.0**place + 0.5) for place in range(WINDOW)))


_EDGES = _edges()
_MIDDLES = [(lower + upper) / 2 for lower, upper in itertools.pairwise(_EDGES)]
_SHAPES_AT = {shape: {at: shape(at) for at in _MIDDLES} for shape in _SHAPES}  # looked at for every layer of a run


def _densities(counts: Sequence[int]) -> list[_Seen]:
    return [
        _Seen(at, math.log(count / (upper - lower)), min(count, TRUST))
        for at, lower, upper, count in zip(_MIDDLES, _EDGES, _EDGES[1:], counts, strict=False)
        if count
    ]


def _best_curve(seen: Sequence[_Seen]) -> _Curve | None:
    """The shape that fits best, each parameter of it counted as two in the sum of squares (Akaike's measure)."""
    best: tuple[float, _Curve] | None = None
    for misfit, curve in (_fitted_lognormal(seen), *(_fitted(seen, shape) for shape in _SHAPES)):
        if curve is not None and (best is None or misfit < best[0]):
            best = misfit, curve
    return best and best[1]


_NO_FIT = math.inf, None  # it would grow without end, or the points do not decide


def _fitted(seen: Sequence[_Seen], shape: _Curve) -> tuple[float, _Curve | None]:
    """How badly a line of twice as many for each power of two, bent by the shape, fits; and the line."""
    if len(seen) <= 2:
        return _NO_FIT
    known = _SHAPES_AT[shape]
    points = [(known[one.at], one.density - LN2 * one.at, one.weight) for one in seen]
    total = sum(weight for _, _, weight in points)
    mean_x = sum(x * weight for x, _, weight in points) / total
    mean_y = sum(y * weight for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    if spread < 1e-12:
        return _NO_FIT
    factor = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread
    if factor < 0:
        return _NO_FIT
    start = mean_y - factor * mean_x
    misfit = sum(weight * (y - start - factor * x) ** 2 for x, y, weight in points) + 2 * 2
    return misfit, lambda at: LN2 * at + start + factor * shape(at)


def _fitted_lognormal(seen: Sequence[_Seen]) -> tuple[float, _Curve | None]:
    if len(seen) <= 3:
        return _NO_FIT
    rows = [(1.0, one.at, -one.at * one.at) for one in seen]
    factors = _least_squares(rows, [one.density for one in seen], [one.weight for one in seen])
    if factors is None or factors[2] < 0:
        return _NO_FIT
    start, slope, bend = factors
    misfit = sum(one.weight * (one.density - start - slope * one.at + bend * one.at**2) ** 2 for one in seen) + 2 * 3
    return misfit, lambda at: start + slope * at - bend * at * at


def _steepest(seen: Sequence[_Seen], curve: _Curve) -> float:
    """How fast the density may fall below the limit: by half for each power of two, unless it is seen to fall faster.

    A distribution with its peak at zero never falls faster; one that has a hole there, as the log-normal, shows it.
    """
    shown = (seen[1].density - seen[0].density) / (seen[1].at - seen[0].at)
    at_limit = (curve(-1.0) - curve(-1.0 - HALF)) / HALF
    return math.inf if shown > HOLE * LN2 and at_limit > 1.5 * LN2 else max(LN2, shown)


def _sum_below(curve: _Curve, steepest: float) -> float:
    total, at, here = 0.0, -1.0, curve(-1.0)
    density = here
    while at > -1.0 - DEPTH:
        at -= HALF
        below = curve(at)
        slope = min((here - below) / HALF, steepest)
        part = HALF * math.exp(min(density - slope * HALF / 2, 60.0))
        total += part
        if part < NEGLIGIBLE * total:
            break
        density -= slope * HALF
        here = below
    return total


def _least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]
) -> list[float] | None:
    """The factors of a weighted fit, by elimination; None where the points do not decide them."""
    size = len(rows[0])
    matrix = [
        [sum(w * row[i] * row[j] for row, w in zip(rows, weights, strict=True)) for j in range(size)]
        + [sum(w * row[i] * y for row, y, w in zip(rows, targets, weights, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(matrix[r][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:
            return None
        for r in range(size):
            if r != i:
                share = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - share * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
