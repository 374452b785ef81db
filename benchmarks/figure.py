"""A picture of lines in plain SVG, each with its name at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Line", "Panel", "drawn", "powers_of_ten"]

COLOURS = ("#1f5fa8", "#b5402a", "#2e7d46", "#7a4a99", "#8a6a00", "#00798c")
WIDTH, HEIGHT = 560, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 168, 48, 52  # around a panel; names stand to its right
APART = 15  # at least, between two names
FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right; dashed: what others are measured by."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over axes with named places; the first and the last place of an axis are its ends."""

    title: str
    lines: Sequence[Line]
    across: Sequence[tuple[float, str]]
    across_title: str
    up: Sequence[tuple[float, str]]
    log_across: bool = True
    log_up: bool = True


def drawn(title: str, panels: Sequence[Panel]) -> str:
    """All panels beside each other."""
    width = WIDTH * len(panels)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {HEIGHT}' width='{width}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{HEIGHT}' fill='#ffffff'/>",
    ]
    for place, panel in enumerate(panels):
        parts.append(f"<g transform='translate({place * WIDTH} 0)'>")
        parts += _Drawing(panel).parts()
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


class _Drawing:
    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._right, self._bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def parts(self) -> list[str]:
        found = [_text(LEFT, 26, self._panel.title, size=15, weight="600"), *self._axes()]
        ends = []
        for place, line in enumerate(self._panel.lines):
            colour = "#444444" if line.dashed else COLOURS[place % len(COLOURS)]
            points = [(self._x(across), self._y(up)) for across, up in line.points]
            found.append(_path(points, colour, dashed=line.dashed))
            ends.append((points[-1][1], line.name, colour))
        return found + [_text(self._right + 8, y + 4, name, colour=colour) for y, name, colour in _spread(ends)]

    def _axes(self) -> list[str]:
        found = []
        for value, text in self._panel.up:
            if text:
                y = self._y(value)
                found.append(f"<path d='M{LEFT} {y:.1f}H{self._right}' stroke='#dddddd'/>")
                found.append(_text(LEFT - 8, y + 4, text, anchor="end"))
        for value, text in self._panel.across:
            x = self._x(value)
            found.append(f"<path d='M{x:.1f} {TOP}V{self._bottom}' stroke='#eeeeee'/>")
            found.append(_text(x, self._bottom + 18, text, anchor="middle"))
        middle = (LEFT + self._right) / 2
        return [*found, _text(middle, self._bottom + 38, self._panel.across_title, anchor="middle")]

    def _x(self, value: float) -> float:
        return LEFT + (self._right - LEFT) * _share(value, self._panel.across, log=self._panel.log_across)

    def _y(self, value: float) -> float:
        return self._bottom - (self._bottom - TOP) * _share(value, self._panel.up, log=self._panel.log_up)


def _share(value: float, axis: Sequence[tuple[float, str]], *, log: bool) -> float:
    """How far along the axis a value is, from 0 to 1."""
    low, high = axis[0][0], axis[-1][0]
    value = min(max(value, low), high)
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)


def _spread(ends: Sequence[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """From top to bottom, none over another."""
    found: list[tuple[float, str, str]] = []
    for y, name, colour in sorted(ends):
        found.append((max(y, found[-1][0] + APART) if found else y, name, colour))
    return found


def _path(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool) -> str:
    way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashes = " stroke-dasharray='5 4'" if dashed else ""
    return f"<path d='{way}' fill='none' stroke='{colour}' stroke-width='2'{dashes}/>"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    colour: str = "#333333",
    anchor: str = "start",
    weight: str = "400",
) -> str:
    form = f"x='{x:.1f}' y='{y:.1f}' font-size='{size}' font-weight='{weight}' fill='{colour}' text-anchor='{anchor}'"
    return f"<text {FONT} {form}>{escape(text)}</text>"


def powers_of_ten(low: float, high: float) -> list[tuple[float, str]]:
    """Return the places of an axis of seconds: its ends, without names, and the powers of ten between.

    >>> powers_of_ten(5e-4, 2.0)
    [(0.0005, ''), (0.001, '1 ms'), (0.01, '10 ms'), (0.1, '100 ms'), (1.0, '1 s'), (2.0, '')]
    """
    exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [(low, ""), *((10.0**exponent, _seconds(exponent)) for exponent in exponents), (high, "")]


def _seconds(exponent: int) -> str:
    """A power of ten of seconds.

    >>> [_seconds(exponent) for exponent in (-5, -1, 0, 4)]
    ['10 µs', '100 ms', '1 s', '10,000 s']
    """
    for unit, size in (("s", 0), ("ms", -3), ("µs", -6)):
        if exponent >= size:
            return f"{10 ** (exponent - size):,} {unit}"
    return f"10^{exponent} s"
