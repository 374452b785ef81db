"""A census as a row of bars small enough for a table, coloured by what a format makes of each power of two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampwise.report.layers import Layer

__all__ = ["Span", "bars", "legend", "span_of"]

WIDTH, HEIGHT = 180, 24
MOST_BARS = 60  # FP64 has two thousand binades; what lies below is drawn in the lowest bar
FATES = ("lost", "subnormal", "normal", "overflow")


@dataclass(frozen=True, slots=True)
class Span:
    """The powers of two from left to right, the same for all layers, so that they can be compared."""

    low: int
    high: int


def span_of(layers: Sequence[Layer]) -> Span:
    """What all of the layers hold."""
    exponents = [exponent for layer in layers for exponent, count in layer.census.binades.items() if count]
    if not exponents:
        return Span(-24, 0)
    high = max(exponents)
    return Span(max(min(exponents), high - MOST_BARS + 1), high)


def bars(layer: Layer, span: Span) -> str:
    """The bars as inline SVG, one path for each fate; empty for a layer of zeros."""
    counts: dict[int, int] = {}
    for exponent, count in layer.census.binades.items():
        counts[max(exponent, span.low)] = counts.get(max(exponent, span.low), 0) + count
    if not any(counts.values()):
        return ""
    tallest = max(counts.values())
    wide = WIDTH / (span.high - span.low + 1)
    paths: dict[str, list[str]] = {}
    for exponent, count in sorted(counts.items()):
        if count:
            tall = max(1, round(HEIGHT * count / tallest))
            left = (exponent - span.low) * wide
            paths.setdefault(_fate(layer, exponent), []).append(
                f"M{left:.1f} {HEIGHT}h{wide * 0.85:.1f}v-{tall}h-{wide * 0.85:.1f}z"
            )
    drawn = "".join(f'<path class="{fate}" d="{"".join(path)}"/>' for fate, path in paths.items())
    told = f"|g| from {layer.census.amin:.3g} to {layer.census.amax:.3g}"
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{told}"><title>{told}</title>{drawn}</svg>'


def legend(drawn: Iterable[str]) -> list[str]:
    """The fates that need a word, of all that ``bars`` has drawn: none where all values are plain numbers."""
    text = "".join(drawn)
    found = [fate for fate in FATES if f'class="{fate}"' in text]
    return [] if found == ["normal"] else found


def _fate(layer: Layer, exponent: int) -> str:
    fmt, scaled = layer.fmt, exponent + layer.exponent
    if scaled > fmt.overflow_binade:
        return "overflow"
    if not layer.underflow or not layer.underflow.nonzero:
        return "normal"  # it never was in FP16, and nothing of it was lost
    if fmt.flush_exponent is not None and scaled + 1 <= fmt.flush_exponent:
        return "lost"
    return "subnormal" if scaled + 1 <= fmt.lowest_exponent else "normal"
