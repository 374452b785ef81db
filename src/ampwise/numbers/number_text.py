"""Formatting of numbers for people."""

from __future__ import annotations

import math

IN_DIGITS = 1e7  # numbers below this are written with all digits
EASY = 2.0**20  # powers of two up to this are written in digits


def number_text(value: float) -> str:
    """
    >>> [number_text(value) for value in (81920.0, 2.3125, 1e-8, 1e39, float("nan"), float("-inf"))]
    ['81,920', '2.312', '1e-08', '1e+39', 'NaN', '-inf']
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value}"
    return f"{value:,.0f}" if 1000 <= abs(value) < IN_DIGITS else f"{value + 0.0:.4g}"  # turns -0.0 into 0


def count_text(count: float) -> str:
    """Format a large count, such as of parameters or of tokens per second.

    >>> count_text(6_738_415_616), count_text(124_000_000), count_text(318_000), count_text(12.3456)
    ('6.74 B', '124 M', '318 k', '12.3')
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def scale_text(scale: float) -> str:
    """Format a loss scale: in digits if they are few, else as a power of two.

    >>> scale_text(65536.0), scale_text(2.0**24), scale_text(0.5), scale_text(2.0**-20), scale_text(1000.0)
    ('65536', '2**24', '0.5', '2**-20', '1000')
    """
    if math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5 and not 1 / 64 <= scale <= EASY:
        return f"2**{math.frexp(scale)[1] - 1}"
    return f"{scale:.0f}" if scale == round(scale, 0) and scale < EASY * 1e3 else f"{scale:g}"
