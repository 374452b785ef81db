"""A census as an HTML figure: bars over exponents, coloured by what a format would lose."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ampwise.finding.html import COLOURS
from ampwise.numbers.formats import Format, find_scalar_format

if TYPE_CHECKING:
    from ampwise.numbers.census.algebra import Census

__all__ = ["census_html"]

BAR_WIDTH, HEIGHT, WIDEST = 7, 80, 840


def census_html(census: Census, fmt: str | Format = "fp16") -> str:
    """Return bars coloured by what ``fmt`` does to the values, with the numbers in a line below."""
    found = find_scalar_format(fmt)
    bars = list(census.histogram())
    tallest = max((count for _, count in bars), default=1)
    width = min(BAR_WIDTH, WIDEST / max(1, len(bars)))  # FP64 has two thousand binades
    drawn = "".join(
        f'<rect x="{column * width:g}" y="{HEIGHT - _height(count, tallest)}" width="{width * 0.85:g}" '
        f'height="{_height(count, tallest)}" fill="{COLOURS[_fate(exponent, found)]}">'
        f"<title>2^{exponent} to 2^{exponent + 1}: {count:,}</title></rect>"
        for column, (exponent, count) in enumerate(bars)
    )
    legend = " ".join(f'<span style="color:{colour}">■</span>&nbsp;{escape(fate)}' for fate, colour in COLOURS.items())
    return (
        f'<figure style="margin:0;font:13px sans-serif">'
        f'<svg width="{max(1, len(bars)) * width:g}" height="{HEIGHT}" role="img" '
        f'aria-label="values by power of two">{drawn}</svg>'
        f"<figcaption>{escape(_caption(census, found))}<br>{legend}</figcaption></figure>"
    )


def _height(count: int, tallest: int) -> int:
    return max(2, round(HEIGHT * count / tallest)) if count else 0


def _fate(exponent: int, fmt: Format) -> str:
    if fmt.flush_exponent is not None and exponent + 1 <= fmt.flush_exponent:
        return "lost"
    if exponent + 1 <= fmt.lowest_exponent:
        return "subnormal"
    return "overflow" if 2.0**exponent > fmt.max else "normal"


def _caption(census: Census, fmt: Format) -> str:
    parts = [
        f"{census.count:,} values: {census.zeros:,} zeros, {census.infs:,} infs, {census.nans:,} NaNs",
        f"|x| from {census.amin:.3g} to {census.amax:.3g}",
        f"{fmt.title} loses {census.flushed(fmt):,}, best scale 2^{census.best_scale(fmt)}",
    ]
    return "; ".join(parts)
