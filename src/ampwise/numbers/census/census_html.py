"""A census as an HTML figure: bars over exponents, coloured by what a format would lose."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ampwise.finding.html import COLOURS
from ampwise.numbers.formats import find_scalar_format

if TYPE_CHECKING:
    from ampwise.numbers.census.algebra import Census

BAR_WIDTH, HEIGHT, WIDEST = 7, 80, 840


def census_html(census: Census) -> str:
    """Return bars coloured by what FP16 does to the values, with the numbers in a line below."""
    found = find_scalar_format("fp16")
    bars = list(census.histogram())

    def fate(exponent: int) -> str:
        if found.flush_exponent is not None and exponent + 1 <= found.flush_exponent:
            return "lost"
        if exponent + 1 <= found.lowest_exponent:
            return "subnormal"
        return "overflow" if 2.0**exponent > found.max else "normal"

    tallest = max((count for _, count in bars), default=1)
    width = min(BAR_WIDTH, WIDEST / max(1, len(bars)))  # FP64 has two thousand binades
    drawn = "".join(
        f'<rect x="{column * width:g}" y="{HEIGHT - _height(count, tallest)}" width="{width * 0.85:g}" '
        f'height="{_height(count, tallest)}" fill="{COLOURS[fate(exponent)]}">'
        f"<title>2^{exponent} to 2^{exponent + 1}: {count:,}</title></rect>"
        for column, (exponent, count) in enumerate(bars)
    )
    caption = (
        f"{census.count:,} values: {census.zeros:,} zeros, {census.infs:,} infs, {census.nans:,} NaNs; "
        f"|x| from {census.amin:.3g} to {census.amax:.3g}; "
        f"{found.title} loses {census.flushed(found):,}, best scale 2^{census.best_scale(found)}"
    )
    legend = " ".join(f'<span style="color:{colour}">■</span>&nbsp;{escape(name)}' for name, colour in COLOURS.items())
    return (
        f'<figure style="margin:0;font:13px sans-serif">'
        f'<svg width="{max(1, len(bars)) * width:g}" height="{HEIGHT}" role="img" '
        f'aria-label="values by power of two">{drawn}</svg>'
        f"<figcaption>{escape(caption)}<br>{legend}</figcaption></figure>"
    )


def _height(count: int, tallest: int) -> int:
    return max(2, round(HEIGHT * count / tallest)) if count else 0
