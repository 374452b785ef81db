"""A curve in one or two lines of text, in which no minimum and no maximum is lost.

In braille each character is two columns of four dots, and a column has all dots from its lowest to its highest value.
A terminal without it gets a character for the highest value of each column; the ends of the axis are told in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ampwise.record.bucket import Spread

__all__ = ["BAD", "Axis", "axis_of", "columns_in", "drawn"]

BAD = "!"  # where a value was inf or NaN
LOG_FROM = 8.0  # times the lowest, at which the highest would press all else to the ground
EMPTY = 0x2800
DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a character, by column, from below
ASCII = "_.-=+*#@"


class Axis(NamedTuple):
    """From where to where the curve goes."""

    low: float
    high: float
    is_log: bool

    def height(self, value: float) -> float:
        """From 0 to 1."""
        if self.high == self.low:
            return 0.5
        if self.is_log:
            low, high, at = math.log(self.low), math.log(self.high), math.log(value)
        else:
            largest = max(abs(self.low), abs(self.high))  # by which the numbers stay in range, however large
            low, high, at = self.low / largest, self.high / largest, value / largest
        return min(max((at - low) / (high - low), 0.0), 1.0)


def axis_of(spreads: Sequence[Spread]) -> Axis | None:
    """That all finite values have room on; None where there are none."""
    lows = [spread.low for spread in spreads if spread.low is not None]
    highs = [spread.high for spread in spreads if spread.high is not None]
    if not lows:
        return None
    low, high = min(lows), max(highs)
    return Axis(low, high, low > 0 and high / low >= LOG_FROM)


def columns_in(cells: int, *, braille: bool) -> int:
    """How many columns that many characters have."""
    return cells * 2 if braille else cells


def drawn(spreads: Sequence[Spread], axis: Axis | None, *, rows: int, braille: bool) -> list[str]:
    """As many lines as ``rows``, from above; a character each, or each two, of ``spreads``.

    >>> drawn([Spread.of(value) for value in (1.0, 2.0, 3.0, 4.0)], Axis(1.0, 4.0, False), rows=1, braille=True)
    ['⡠⠊']
    >>> drawn([Spread.of(1.0), Spread.of(math.nan), Spread.of(4.0)], Axis(1.0, 4.0, False), rows=1, braille=False)
    ['_!@']
    """
    if not braille:
        return [*[" " * len(spreads)] * (rows - 1), "".join(_plain(spread, axis) for spread in spreads)]
    masks = [[_mask(spread, axis, row, rows) for spread in spreads] for row in reversed(range(rows))]
    lines = ["".join(_cell(pair) for pair in zip(mask[::2], [*mask[1::2], 0], strict=False)) for mask in masks]
    return [_marked(lines[0], spreads), *lines[1:]]


def _plain(spread: Spread, axis: Axis | None) -> str:
    if spread.bad:
        return BAD
    if spread.high is None or axis is None:
        return " "
    return ASCII[round(axis.height(spread.high) * (len(ASCII) - 1))]


def _mask(spread: Spread, axis: Axis | None, row: int, rows: int) -> int:
    """Which of the four dots of a column are set, as bits from below, in the ``row``-th line from below."""
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


def _marked(line: str, spreads: Sequence[Spread]) -> str:
    bad = {number // 2 for number, spread in enumerate(spreads) if spread.bad}
    return "".join(BAD if number in bad else cell for number, cell in enumerate(line))
