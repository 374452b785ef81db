"""Curves over steps as inline SVG: a line of means in a band from the lowest to the highest value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ampwise.printers.terminal import printable
from ampwise.record.bucket import Bucket
from ampwise.report.axis import Axis, axis_for, round_numbers
from ampwise.report.curves import by_optimizer, spread_of

__all__ = ["COLUMNS", "chart"]

WIDTH, HEIGHT = 480, 190
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 26
COLUMNS = 400  # points a line: one a pixel
MOST_LINES = 6  # optimizers in one picture


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    steps: Axis
    values: Axis

    def x(self, step: float) -> str:
        return _short(LEFT + (WIDTH - LEFT - RIGHT) * self.steps.share(step))

    def y(self, value: float) -> str:
        return _short(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self.values.share(value))


def chart(
    title: str,
    metric: str,
    points: Sequence[Bucket],
    *,
    powers_of_two: bool = False,
    skips: bool = False,
    names: Mapping[int, str] | None = None,
) -> str:
    """A figure of one metric, a line for each optimizer; empty where nothing was measured.

    names: of optimizers, where they are known.
    """
    lines = list(by_optimizer(points).items())
    shown = lines[:MOST_LINES]
    drawn = [point for _, line in shown for point in line]
    spreads = [spread_of(point, metric) for point in drawn]
    ends = [end for spread in spreads for end in (spread.low, spread.high) if end is not None]
    if not ends:
        never = "At no step was this a finite number." if any(spread.bad for spread in spreads) else ""
        return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{never}</figure>' if never else ""
    frame = _Frame(
        steps=Axis(low=min(point.first for point in drawn), high=max(point.last for point in drawn)),
        values=axis_for(ends, base=2 if powers_of_two else 10, always=powers_of_two),
    )
    curves = "".join(_curve(line, metric, frame, place) for place, (_, line) in enumerate(shown))
    bad = "".join(_not_finite(point, metric, frame) for point in drawn if spread_of(point, metric).bad)
    skipped = "".join(_skips(point, frame) for point in drawn if point.skipped) if skips else ""
    told = [(names or {}).get(optimizer, f"optimizer {optimizer}") for optimizer, _ in lines]
    legend = _legend(told, bool(bad), bool(skipped))
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{legend}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over steps">'
        f"{_grid(frame)}{curves}{skipped}{bad}</svg></figure>"
    )


def _grid(frame: _Frame) -> str:
    parts = []
    for value, label in frame.values.ticks():
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{_label(label)}</text>')
    foot = HEIGHT - BOTTOM
    parts.append(f'<path class="axis" d="M{LEFT} {foot}H{WIDTH - RIGHT}"/>')
    steps = frame.steps
    marks = sorted({round(step) for step in [steps.low, *round_numbers(steps.low, steps.high)]})
    # Too near to the first step, a label would stand on that step's own.
    apart = [step for step in marks if step == steps.low or steps.share(step) > 0.1]
    for step in apart:
        anchor = "end" if steps.share(step) > 0.95 else "middle"
        parts.append(f'<text x="{frame.x(step)}" y="{foot + 18}" text-anchor="{anchor}">{step:,}</text>')
    return "".join(parts)


def _label(text: str) -> str:
    """A power with its exponent raised."""
    base, caret, exponent = text.partition("^")
    if not caret:
        return escape(text)
    return f'{base}<tspan dy="-5" font-size="9">{exponent.replace("-", "−")}</tspan>'


def _curve(line: Sequence[Bucket], metric: str, frame: _Frame, place: int) -> str:
    pieces = [_piece(piece, metric, frame) for piece in _unbroken(line, metric)]
    band = "".join(band for band, _ in pieces)
    means = "".join(means for _, means in pieces)
    return f'<path class="band line{place}" d="{band}"/><path class="line line{place}" d="{means}"/>'


def _unbroken(line: Sequence[Bucket], metric: str) -> list[list[Bucket]]:
    """The stretches without a gap: where nothing was measured, nothing is drawn."""
    pieces: list[list[Bucket]] = [[]]
    for point in line:
        if not spread_of(point, metric).finite:
            pieces.append([])
        else:
            pieces[-1].append(point)
    return [piece for piece in pieces if piece]


def _piece(piece: Sequence[Bucket], metric: str, frame: _Frame) -> tuple[str, str]:
    """The band around a line and the line, as SVG paths; a step alone is a short dash."""
    if len(piece) == 1:
        # It reaches to both its ends, so that what stands for many steps is seen over all of them.
        x, width = frame.x(piece[0].first), 2
        xs = [x, frame.x(piece[0].last)] if piece[0].first < piece[0].last else [x, _short(float(x) + width)]
        piece = [piece[0], piece[0]]
    else:
        xs = [_middle(point, frame) for point in piece]
    spreads = [spread_of(point, metric) for point in piece]
    above = [f"{x} {frame.y(spread.high or 0.0)}" for x, spread in zip(xs, spreads, strict=True)]
    below = [f"{x} {frame.y(spread.low or 0.0)}" for x, spread in zip(xs, spreads, strict=True)]
    means = [f"{x} {frame.y(spread.mean or 0.0)}" for x, spread in zip(xs, spreads, strict=True)]
    band = "" if above == below else f"M{'L'.join([*above, *reversed(below)])}Z"
    return band, f"M{'L'.join(means)}"


def _skips(point: Bucket, frame: _Frame) -> str:
    told = f"{point.skipped:,} skipped, {_steps(point)}"
    return f'<path class="skip" d="M{_middle(point, frame)} {HEIGHT - BOTTOM}v-9"><title>{told}</title></path>'


def _not_finite(point: Bucket, metric: str, frame: _Frame) -> str:
    return f'<path class="bad" d="M{_middle(point, frame)} {TOP}v9"><title>inf or NaN, {_steps(point)}</title></path>'


def _middle(point: Bucket, frame: _Frame) -> str:
    return frame.x((point.first + point.last) / 2)


def _steps(point: Bucket) -> str:
    return f"step {point.first:,}" if point.first == point.last else f"steps {point.first:,} to {point.last:,}"


def _legend(optimizers: Sequence[str], bad: bool, skipped: bool) -> str:
    entries = []
    if len(optimizers) > 1:
        entries = [(f"key{place}", name) for place, name in enumerate(optimizers[:MOST_LINES])]
    more = len(optimizers) - MOST_LINES
    entries += [("", f"{more:,} more not drawn")] if more > 0 else []
    entries += [("keyskip", "skipped step")] if skipped else []
    entries += [("keybad", "inf or NaN")] if bad else []
    return "".join(f' <span class="key {name}">{escape(printable(text))}</span>' for name, text in entries)


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
