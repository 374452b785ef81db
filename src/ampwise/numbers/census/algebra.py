"""Census: counts of a tensor's values, and everything that follows from them without reading the tensor again.

A binade here is closed at its *upper* end: binade ``e`` holds the magnitudes with ``2**e < |x| <= 2**(e+1)``.
Rounding to nearest sends a magnitude to zero exactly if it is at or below a power of two (half the smallest
subnormal is a tie, and zero is even). With this choice a histogram alone gives the exact number of values that
underflow in any format at any scale, also for values that are powers of two themselves.
"""

from __future__ import annotations

import bisect
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ampwise.errors import BadInput
from ampwise.numbers.formats import BlockFormat, Format, binade_of, find_format, find_scalar_format


class Count(int):
    """Integer with bounds: the true count is between ``low`` and ``high``, and the value is ``high``.

    It counts lost values, so the value never understates the loss.

    >>> Count(3, 3), Count(0, 7)
    (Count(3), Count(0..7))
    >>> Count(0, 7) + 1, Count(0, 7).exact, f"{Count(0, 7)}"
    (8, False, '0–7')
    """

    low: int
    high: int

    def __new__(cls, low: int, high: int | None = None) -> Count:
        high = low if high is None else high
        if low > high:
            raise ValueError(f"a count cannot be at least {low} and at most {high}")
        count = super().__new__(cls, high)
        count.low, count.high = int(low), int(high)
        return count

    @property
    def exact(self) -> bool:
        """Whether the bounds are equal."""
        return self.low == self.high

    def __str__(self) -> str:
        return str(self.high) if self.exact else f"{self.low}–{self.high}"

    def __format__(self, spec: str) -> str:
        low, high = format(self.low, spec), format(self.high, spec)
        return high if self.exact else f"{low}–{high}"

    def __repr__(self) -> str:
        return f"Count({self.high})" if self.exact else f"Count({self.low}..{self.high})"

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # copies keep the bounds
        return self.low, self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Counts of a tensor's values by power of two. ``+`` merges; scaling by ``2**k`` shifts.

    ``binades`` are the counts by exponent; ``zeros``, ``infs`` and ``nans`` those of the other values. ``amax`` and
    ``amin`` are the largest and smallest finite magnitudes above zero (0.0 if there are none), and ``sum_squares`` is
    over the finite values. Equality compares the counts and the extremes, which are exact;
    not the sum of squares, whose last bits depend on the order of summation.

    >>> gradients = Census(binades={-30: 5, -20: 90, -3: 4}, zeros=1, amax=0.2, amin=2**-29.5)
    >>> gradients.flushed("fp16"), gradients.flushed("fp16", 16)
    (Count(5), Count(0))
    >>> gradients.best_scale("fp16")  # as an exponent: 2**16
    16
    """

    binades: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    amax: float = 0.0
    amin: float = 0.0
    sum_squares: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.amin <= self.amax < math.inf:
            raise BadInput(f"Census(amin={self.amin}, amax={self.amax}): expected finite numbers, 0 <= amin <= amax.")

    def __repr__(self) -> str:
        counts = {"zero": self.zeros, "inf": self.infs, "NaN": self.nans}
        special = "".join(f", {count:,} {what}" for what, count in counts.items() if count)
        between = f", magnitudes from {self.amin:.3g} to {self.amax:.3g}" if self.nonzeros else ""
        return f"<Census of {self.count:,} values{special}{between}>"

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.binades.items())), self.zeros, self.infs, self.nans, self.amax, self.amin))

    @property
    def count(self) -> int:
        """Number of all values."""
        return self.nonzeros + self.zeros + self.infs + self.nans

    @property
    def nonzeros(self) -> int:
        """Number of finite values that are not zero."""
        return sum(self.binades.values())

    @property
    def finite(self) -> bool:
        """Whether there is neither infinity nor NaN."""
        return not (self.infs or self.nans)

    @property
    def norm(self) -> float:
        """Euclidean norm, as in torch: NaN if there is a NaN, else infinity if there is one."""
        if self.nans:
            return math.nan
        return math.inf if self.infs else math.sqrt(self.sum_squares)

    def __add__(self, other: Census) -> Census:
        if not isinstance(other, Census):
            return NotImplemented
        merged = dict(self.binades)
        for exponent, count in other.binades.items():
            merged[exponent] = merged.get(exponent, 0) + count
        return Census(
            binades=merged,
            zeros=self.zeros + other.zeros,
            infs=self.infs + other.infs,
            nans=self.nans + other.nans,
            amax=max(self.amax, other.amax),
            amin=min(self.amin, other.amin) or max(self.amin, other.amin),  # 0.0 stands for "none"
            sum_squares=self.sum_squares + other.sum_squares,
        )

    def __radd__(self, other: object) -> Census:
        # sum(censuses) starts from 0.
        return self if other == 0 else NotImplemented

    def scaled(self, k: int) -> Census:
        """Return the census of the values times ``2**k``, as real numbers; FP64 must hold the extremes."""
        amax, amin = _ldexp(self.amax, k), _ldexp(self.amin, k)
        if math.isinf(amax) or (self.amin and not amin):
            raise BadInput(f"scaled({k}): magnitudes from {self.amin:.3g} to {self.amax:.3g} would leave FP64's range.")
        return Census(
            binades={exponent + k: count for exponent, count in self.binades.items()},
            zeros=self.zeros,
            infs=self.infs,
            nans=self.nans,
            amax=amax,
            amin=amin,
            sum_squares=_ldexp(self.sum_squares, 2 * k),
        )

    def flushed(self, fmt: str | Format | BlockFormat | Any, k: int = 0) -> Count:
        """Return how many non-zero values ``fmt`` rounds to zero after scaling by ``2**k``.

        Exact for scalar formats. In a block format it depends on which values share a block: at most as many as if the
        whole tensor were one block.
        """
        found = find_format(fmt)
        if isinstance(found, Format):
            return Count(self._at_or_below(found.flush_exponent, k))
        flush = found.element.flush_exponent
        if not self.nonzeros or flush is None:
            return Count(0)
        # No block's scale is above the power of two next to this; a tensor scale is not limited here.
        largest_scale = sys.float_info.max if found.tensor_scale else found.scale.max
        widest = min(max(_ldexp(self.amax, k) / found.element.max, found.scale.smallest), largest_scale)
        return Count(0, self._at_or_below(math.frexp(widest)[1] + flush, k))

    def subnormal(self, fmt: str | Format | Any, k: int = 0) -> Count:
        """Return how many values are subnormal in ``fmt``, with fewer bits, after scaling by ``2**k``.

        These are below the smallest normal and not flushed. A value equal to the smallest normal is in the same binade
        as some of them and cannot be distinguished, hence the bounds.
        """
        found = find_scalar_format(fmt)
        if found.flush_exponent is None:
            return Count(0, 0)
        edge = found.lowest_exponent - k  # in units of this census
        at_edge = self.binades.get(edge - 1, 0)
        if self.amax < _ldexp(1.0, edge):
            certain = at_edge
        else:
            certain = int(at_edge > 0 and self.amin < _ldexp(1.0, edge) and binade_of(self.amin) == edge - 1)
        inside = self._at_or_below(found.lowest_exponent - 1, k) - self._at_or_below(found.flush_exponent, k)
        return Count(inside + certain, inside + at_edge)

    def overflowed(self, fmt: str | Format | BlockFormat | Any, k: int = 0) -> Count:
        """Return how many finite values are too large for ``fmt`` after scaling by ``2**k``.

        The limit is inside a binade; the histogram cannot tell which of that binade's values are beyond it, but
        ``amax`` and ``amin`` often can. Block formats have scales of their own: only values beyond every scale count.
        """
        found = find_format(fmt)
        limit_binade = found.overflow_binade - k
        above = sum(count for exponent, count in self.binades.items() if exponent > limit_binade)
        straddling = self.binades.get(limit_binade, 0)
        if not straddling or not _overflows(self.amax, found, k):
            return Count(above, above)
        if _overflows(self.amin, found, k):
            return Count(above + straddling, above + straddling)
        low = int(binade_of(self.amax) == limit_binade)  # the largest itself is known to be beyond
        high = straddling - int(binade_of(self.amin) == limit_binade)  # the smallest is known not to be
        return Count(above + low, above + high)

    def best_scale(self, fmt: str | Format | Any, *, headroom: int = 0) -> int:
        """Return the exponent ``k`` of the loss scale ``2**k`` at which ``fmt`` loses the least of these values.

        Nothing may overflow, with ``headroom`` further doublings to spare; then as few values as possible are flushed,
        then as few mantissa bits as possible are lost to subnormals; among equals, the scale nearest to 1.
        """
        found = find_scalar_format(fmt)
        if not self.nonzeros:
            return 0
        highest = found.overflow_binade - binade_of(self.amax) + 1
        while _overflows(self.amax, found, highest):
            highest -= 1
        highest -= headroom
        if highest <= 0:
            return highest
        least = self._loss(found, highest)
        # Loss never grows with the scale, so bisect for the first exponent with the least loss.
        return bisect.bisect_left(range(highest), True, key=lambda k: self._loss(found, k) == least)

    def _loss(self, fmt: Format, k: int) -> tuple[int, int]:
        """Return the values flushed, and the mantissa bits that the others lose, after scaling by ``2**k``."""
        short_by = ((fmt.lowest_exponent - exponent - k, count) for exponent, count in self.binades.items())
        bits = sum(min(bits, fmt.mantissa_bits + 1) * count for bits, count in short_by if bits > 0)
        return self._at_or_below(fmt.flush_exponent, k), bits

    def _at_or_below(self, exponent: int | None, k: int) -> int:
        """Return how many magnitudes are at most ``2**exponent`` after scaling by ``2**k``."""
        if exponent is None:
            return 0
        return sum(count for e, count in self.binades.items() if e + 1 + k <= exponent)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which ``Census.from_dict`` reads."""
        return {
            "binades": {str(exponent): count for exponent, count in sorted(self.binades.items())},
            "zeros": self.zeros,
            "infs": self.infs,
            "nans": self.nans,
            "amax": self.amax,
            "amin": self.amin,
            "sum_squares": self.sum_squares if math.isfinite(self.sum_squares) else "inf",
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Census:
        """Return the census that ``as_dict`` wrote.

        Args:
            data: plain data.

        Returns:
            the census.

        Raises:
            BadInput: the data is not that of a census.
        """
        try:
            census = cls(
                binades={int(e): _whole(count) for e, count in dict(data["binades"]).items() if count},
                zeros=_whole(data["zeros"]),
                infs=_whole(data["infs"]),
                nans=_whole(data["nans"]),
                amax=float(data["amax"]),
                amin=float(data["amin"]),
                sum_squares=float(data["sum_squares"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"not a census: {error!r}. Census.as_dict() shows the shape.") from error
        # The extremes must be in the outermost binades: queries use both.
        claimed = {binade_of(extreme) for extreme in (census.amin, census.amax) if extreme}
        if claimed != ({min(census.binades), max(census.binades)} if census.binades else set()):
            raise BadInput(f"not a census: magnitudes from {census.amin} to {census.amax} do not fit the binades.")
        if not census.sum_squares >= 0:
            raise BadInput(f"not a census: a sum of squares of {census.sum_squares}.")
        return census

    def to_json(self) -> str:
        """Return the census as one line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Census:
        """Return the census that ``to_json`` wrote.

        Args:
            text: JSON.

        Returns:
            the census.

        Raises:
            BadInput: the text is not that of a census.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadInput(f"not a census: {error}") from error
        if not isinstance(data, dict):
            raise BadInput("not a census: expected a JSON object.")
        return cls.from_dict(data)

    def histogram(self) -> Iterator[tuple[int, int]]:
        """Yield (exponent, count) of the binades from lowest to highest, including empty ones between them."""
        if self.binades:
            for exponent in range(min(self.binades), max(self.binades) + 1):
                yield exponent, self.binades.get(exponent, 0)

    def _repr_html_(self) -> str:
        from ampwise.numbers.census.census_html import census_html

        return census_html(self)


def _overflows(magnitude: float, fmt: Format | BlockFormat, k: int) -> bool:
    scaled = _ldexp(magnitude, k)
    return scaled > fmt.overflow_threshold or (scaled == fmt.overflow_threshold and fmt.overflow_at_threshold)


def _ldexp(value: float, k: int) -> float:
    try:
        return math.ldexp(value, k)
    except OverflowError:
        return math.inf


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
