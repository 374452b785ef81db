"""Draw a curve in one or two lines of text that keeps every minimum and maximum.

In braille each character is two columns of four dots, and a column has all dots from its lowest to its highest value.
Without braille, a character shows the highest value of each column. The ends of the axis are shown as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ampwise.runs.bucket import NumberStats

__all__ = ["BAD", "CurveAxis", "axis_of", "columns_in", "draw"]

BAD = "!"  # where a value was inf or NaN
LOG_FROM = 8.0  # ratio of highest to lowest value from which the axis is logarithmic
EMPTY = 0x2800
DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # bits of a character, by column, bottom up
ASCII = "_.-=+*#@"


class CurveAxis(NamedTuple):
    """Range of a curve."""

    low: float
    high: float
    is_log: bool

    def height(self, value: float) -> float:
        """Return the height of a value, from 0 to 1."""
        if self.high == self.low:
            return 0.5
        if self.is_log:
            low, high, at = math.log(self.low), math.log(self.high), math.log(value)
        else:
            largest = max(abs(self.low), abs(self.high))  # dividing by it avoids an overflow
            low, high, at = self.low / largest, self.high / largest, value / largest
        return min(max((at - low) / (high - low), 0.0), 1.0)


def axis_of(spreads: Sequence[NumberStats]) -> CurveAxis | None:
    """Return an axis that covers all finite values; None if there are none."""
    lows = [spread.low for spread in spreads if spread.low is not None]
    highs = [spread.high for spread in spreads if spread.high is not None]
    if not lows:
        return None
    low, high = min(lows), max(highs)
    return CurveAxis(low, high, low > 0 and high / low >= LOG_FROM)


def columns_in(cells: int, *, braille: bool) -> int:
    """Return the number of columns in that many characters."""
    return cells * 2 if braille else cells


def draw(spreads: Sequence[NumberStats], axis: CurveAxis | None, *, rows: int, braille: bool) -> list[str]:
    """Draw ``rows`` lines, top first; each character shows one of ``spreads``, or two in braille.

    >>> axis = CurveAxis(1.0, 4.0, False)
    >>> draw([NumberStats.of(value) for value in (1.0, 2.0, 3.0, 4.0)], axis, rows=1, braille=True)
    ['⡠⠊']
    >>> draw([NumberStats.of(value) for value in (1.0, math.nan, 4.0)], axis, rows=1, braille=False)
    ['_!@']
    """
    if not braille:
        return [*[" " * len(spreads)] * (rows - 1), "".join(_plain(spread, axis) for spread in spreads)]
    masks = [[_mask(spread, axis, row, rows) for spread in spreads] for row in reversed(range(rows))]
    lines = ["".join(_cell(pair) for pair in zip(mask[::2], [*mask[1::2], 0], strict=False)) for mask in masks]
    return [_marked(lines[0], spreads), *lines[1:]]


def _plain(spread: NumberStats, axis: CurveAxis | None) -> str:
    if spread.bad:
        return BAD
    if spread.high is None or axis is None:
        return " "
    return ASCII[round(axis.height(spread.high) * (len(ASCII) - 1))]


def _mask(spread: NumberStats, axis: CurveAxis | None, row: int, rows: int) -> int:
    """Return the dots of a column that are set in the ``row``-th line from the bottom, as bits, bottom up."""
    if spread.low is None or spread.high is None or axis is None:
        return 0
    top = rows * 4 - 1
    low, high = round(axis.height(spread.low) * top), round(axis.height(spread.high) * top)
    return sum(1 << (dot - row * 4) for dot in range(low, high + 1) if row * 4 <= dot < row * 4 + 4)


def _cell(pair: tuple[int, int]) -> str:
    dots = sum(
        bit for mask, column in zip(pair, DOTS, strict=True) for number, bit in enumerate(column) if mask >> number & 1
    )
    return chr(EMPTY + dots) if dots else " "


def _marked(line: str, spreads: Sequence[NumberStats]) -> str:
    bad = {number // 2 for number, spread in enumerate(spreads) if spread.bad}
    return "".join(BAD if number in bad else cell for number, cell in enumerate(line))
