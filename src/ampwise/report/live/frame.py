"""Draw the state of a run as lines of text that fit the terminal, with curves that keep every minimum and maximum.

In braille each character is two columns of four dots, and a column has all dots from its lowest to its highest value.
Without braille, a character shows the highest value of each column. The ends of the axis are shown as numbers.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ampwise.finding.terminal import encodable, paint, printable
from ampwise.report.curves import thin_out
from ampwise.report.formatting import format_percent
from ampwise.report.layers import layers_of
from ampwise.report.live.run_state import RunState, format_duration, format_number, format_trouble
from ampwise.report.verdict import run_mood, verdict
from ampwise.runs.reader import Run
from ampwise.runs.rows import NO_STATS, NumberStats

if TYPE_CHECKING:
    from rich.text import Text

METRICS = ("loss", "scale", "norm")
RECENT_SAMPLES = 8  # layer samples that are summed for each frame, of hundreds
VERDICT_LINES = 2
TALL = 22  # height from which each curve has two lines
AIRY = 14  # height from which there are blank lines between the parts
LABEL, VALUE, ENDS, GAP = 7, 10, 20, 2  # characters
WIDE = 64  # width from which the ends of the axes are shown
BAD = "!"  # where a value was inf or NaN
LOG_FROM = 8.0  # ratio of highest to lowest value from which the axis is logarithmic
EMPTY = 0x2800
DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # bits of a character, by column, bottom up
ASCII = "_.-=+*#@"


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSize:
    """Size and encoding of the terminal."""

    width: int
    height: int
    encoding: str = "utf-8"

    @property
    def braille(self) -> bool:
        try:
            "⣿…×·".encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def line(self, text: str, style: str = "") -> Text:
        """Return a line without control characters, in the terminal's encoding, cut to its width."""
        return self.joined((text, style))

    def joined(self, *parts: tuple[str, str]) -> Text:
        """Return a line of several parts, each with its own style."""
        from rich.text import Text

        painted = ""
        for text, style in parts:
            harmless = printable(text)
            painted += paint(harmless if self.braille else encodable(harmless, "ascii"), style, bool(style))
        line = Text.from_ansi(painted, no_wrap=True)
        line.truncate(self.width, overflow="ellipsis" if self.braille else "crop")
        return line


def draw_frame(run: Run, now: RunState, paper: TerminalSize) -> list[Text]:
    """Draw the verdict, metrics, findings, events, and the layers that lose most; what does not fit is counted."""
    verdict_lines = textwrap.wrap(
        printable(f"{verdict(run)}."),
        max(paper.width, 2),
        max_lines=VERDICT_LINES if paper.height >= TALL // 2 else 1,
        placeholder="…",
    )
    head = [paper.line(line, run_mood(run)) for line in verdict_lines]
    head.append(paper.line(_status_line(now), "bold"))
    head += [paper.line(format_trouble(now.trouble), "warning")] if now.trouble else []
    pictures = draw_curves(now, paper)
    found = _findings_and_events(now, paper)
    layers = _layers(run, paper)
    blank = [paper.line("")] if paper.height >= AIRY else []
    available = paper.height - len(head) - len(pictures) - len(blank) * sum(map(bool, (pictures, found, layers)))
    for_layers = min(len(layers), max(available // 3, available - len(found)))
    blocks = [
        head,
        pictures,
        _shortened(found, available - for_layers, "findings and events" if now.events else "findings", paper),
    ]
    if for_layers >= min(2, len(layers)):  # no heading alone
        blocks.append(_shortened(layers, for_layers, "layers", paper))
    lines = [line for block in blocks if block for line in [*blank, *block]]
    return lines[len(blank) :][: paper.height]


def _status_line(now: RunState) -> str:
    """Return a line such as ``step 1,234 · 12.3 steps/s · running 3 min``."""
    how_long = "" if now.seconds is None else format_duration(now.seconds)
    status = (
        f"{now.status} {how_long}" if now.status == "running" else f"{now.status}{how_long and f' after {how_long}'}"
    )
    parts = [
        f"step {now.step:,}{now.owner and f' of {now.owner}'}" if now.line else "no step yet",
        "" if now.steps_per_s is None else f"{now.steps_per_s:,.3g} steps/s",
        status.strip(),
        "" if now.quiet_s is None else f"nothing written for {format_duration(now.quiet_s)}",
    ]
    return " · ".join(part for part in parts if part)


def _findings_and_events(now: RunState, paper: TerminalSize) -> list[Text]:
    lines = []
    for seen in now.findings:
        finding = seen.finding
        where = f" {finding.place}" if finding.place.as_dict() else ""
        often = f" ×{seen.count:,}" if seen.count > 1 else ""
        head = (f"{finding.severity.word}[{finding.rule.code}]", str(finding.severity))
        lines.append(paper.joined(head, (f"{where}{often}", "bold"), (f"  {' '.join(finding.message.split())}", "")))
    last = {event.name: event for event in now.events}  # of each kind, the newest first
    for event in sorted(last.values(), key=lambda event: event.step or 0, reverse=True):
        at = "" if event.step is None else f" step {event.step:,}"
        message = f"  {' '.join(event.message.split())}"
        lines.append(paper.joined((event.name, event.level), (at, "bold"), (message, "")))
    return lines


def _layers(run: Run, paper: TerminalSize) -> list[Text]:
    """Draw the layers that lost gradients or had inf or NaN in the last samples."""
    found = layers_of(replace(run, layers=run.layers[-RECENT_SAMPLES:]))
    odd = [layer for layer in found if layer.lost or layer.notes]
    if not odd:
        measured = found and found[0].lost is not None
        return [paper.line(f"none of {len(found):,} layers loses gradients in FP16", "dim")] if measured else []
    heading = "lost in FP16 by layer, at least" if found[0].lost is not None else "layers to look at"
    lines = [paper.line(heading, "dim")]
    for layer in odd:
        lost = "" if layer.lost is None else f"{format_percent(layer.lost):>6}  "
        notes = f"  {', '.join(layer.notes)}" if layer.notes else ""
        lines.append(paper.joined((lost, "bold"), (layer.name, ""), (notes, "warning")))
    return lines


def _shortened(lines: list[Text], most: int, what: str, paper: TerminalSize) -> list[Text]:
    if len(lines) <= most:
        return lines
    kept = max(0, most - 1)
    return [*lines[:kept], paper.line(f"… and {len(lines) - kept:,} more {what}", "dim")] if most > 0 else []


# --- curves --------------------------------------------------------------------------------------------------------


def draw_curves(now: RunState, paper: TerminalSize) -> list[Text]:
    """Draw loss, scale, norm and skipped steps: their current values and curves."""
    cells = max(1, paper.width - LABEL - VALUE - 2 * GAP - (ENDS + GAP if paper.width >= WIDE else 0))
    columns = thin_out(now.line, columns_in(cells, braille=paper.braille))
    lines = []
    for metric in METRICS:
        value = now.present(metric)
        if value is not None:
            stats = [getattr(column, metric) for column in columns]
            style = "bold" if math.isfinite(value) else "error"
            lines += _curve(metric, format_number(value), stats, cells, paper, style=style)
    if columns:
        # Bars as high as the share of skipped steps; none where no step was skipped.
        shares = [column.skipped / column.count for column in columns]
        bars = [NumberStats(0.0, share, share, 1) if share else NO_STATS for share in shares]
        share = f" ({format_percent(now.skipped / now.steps)})" if now.skipped else ""
        lines += _curve("skipped", f"{now.skipped:,}{share}", bars, cells, paper, rows=1)
    return lines


def _curve(
    name: str,
    value: str,
    stats: Sequence[NumberStats],
    cells: int,
    paper: TerminalSize,
    *,
    style: str = "bold",
    rows: int | None = None,
) -> list[Text]:
    rows = rows or (2 if paper.height >= TALL and paper.braille else 1)
    axis = axis_of(stats)
    pictures = draw(stats, axis, rows=rows, braille=paper.braille)
    names, values, ends = [name, *[""] * (rows - 1)], [value, *[""] * (rows - 1)], [""] * rows
    if axis is not None and name != "skipped" and paper.width >= WIDE:
        low, high, log = format_number(axis.low), format_number(axis.high), " log" if axis.is_log else ""
        if low == high:
            ends[-1] = low
        elif rows == 1:
            ends = [f"{low} … {high}{log}"]
        else:
            ends[0], ends[-1] = high, f"{low}{log}"
    return [
        paper.joined(
            (f"{label:{LABEL + GAP}}", "dim"),
            (f"{number:>{VALUE}}", style),
            (" " * GAP, ""),
            *[(cell, "error" if cell == BAD else "fixable") for cell in picture],
            (" " * (cells - len(picture) + GAP) + end if end else "", "dim"),
        )
        for label, number, picture, end in zip(names, values, pictures, ends, strict=True)
    ]


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


def axis_of(stats: Sequence[NumberStats]) -> CurveAxis | None:
    """Return an axis that covers all finite values; None if there are none."""
    lows = [each.low for each in stats if each.low is not None]
    highs = [each.high for each in stats if each.high is not None]
    if not lows:
        return None
    low, high = min(lows), max(highs)
    return CurveAxis(low, high, low > 0 and high / low >= LOG_FROM)


def columns_in(cells: int, *, braille: bool) -> int:
    """Return the number of columns in that many characters."""
    return cells * 2 if braille else cells


def draw(stats: Sequence[NumberStats], axis: CurveAxis | None, *, rows: int, braille: bool) -> list[str]:
    r"""Draw ``rows`` lines, top first; each character shows one of ``stats``, or two in braille.

    >>> axis = CurveAxis(1.0, 4.0, False)
    >>> draw([NumberStats.of(value) for value in (1.0, 2.0, 3.0, 4.0)], axis, rows=1, braille=True) == ["\u2860\u280a"]
    True
    >>> draw([NumberStats.of(value) for value in (1.0, math.nan, 4.0)], axis, rows=1, braille=False)
    ['_!@']
    """
    if not braille:
        plain = ""
        for each in stats:
            if each.bad:
                plain += BAD
            elif each.high is None or axis is None:
                plain += " "
            else:
                plain += ASCII[round(axis.height(each.high) * (len(ASCII) - 1))]
        return [*[" " * len(stats)] * (rows - 1), plain]
    masks = []  # the dots of each column that are set, as bits, bottom up
    for each in stats:
        low = high = -1
        if each.low is not None and each.high is not None and axis is not None:
            low, high = (round(axis.height(value) * (rows * 4 - 1)) for value in (each.low, each.high))
        masks.append(sum(1 << dot for dot in range(low, high + 1) if dot >= 0))
    lines = []
    for row in reversed(range(rows)):
        line = ""
        for number in range(0, len(masks), 2):
            pair = zip(masks[number : number + 2], DOTS, strict=False)
            dots = sum(bit for mask, bits in pair for dot, bit in enumerate(bits) if mask >> (row * 4 + dot) & 1)
            line += chr(EMPTY + dots) if dots else " "
        lines.append(line)
    bad = {number // 2 for number, each in enumerate(stats) if each.bad}
    return ["".join(BAD if number in bad else cell for number, cell in enumerate(lines[0])), *lines[1:]]
