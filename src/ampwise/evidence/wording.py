"""Numbers as people read them."""

from __future__ import annotations

import math

__all__ = ["number", "scale_text"]

IN_DIGITS = 1e7  # up to here large numbers have all their digits
EASY = 2.0**20  # up to here a power of two is known by its digits


def number(value: float) -> str:
    """
    >>> number(81920.0), number(2.3125), number(1e-8), number(1e39), number(float("nan")), number(float("-inf"))
    ('81,920', '2.312', '1e-08', '1e+39', 'NaN', '-inf')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value}"
    return f"{value:,.0f}" if 1000 <= abs(value) < IN_DIGITS else f"{value + 0.0:.4g}"  # and -0.0 is 0


def scale_text(scale: float) -> str:
    """A loss scale: in digits where they are few, else as a power of two.

    >>> scale_text(65536.0), scale_text(2.0**24), scale_text(0.5), scale_text(2.0**-20), scale_text(1000.0)
    ('65536', '2**24', '0.5', '2**-20', '1000')
    """
    if math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5 and not 1 / 64 <= scale <= EASY:
        return f"2**{math.frexp(scale)[1] - 1}"
    return f"{scale:.0f}" if scale == round(scale, 0) and scale < EASY * 1e3 else f"{scale:g}"
