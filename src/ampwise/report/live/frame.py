"""Draw the state of a run as lines of text that fit the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ampwise.finding.terminal import encodable, paint, printable
from ampwise.report.curves import spread_of, thin_out
from ampwise.report.formatting import format_percent
from ampwise.report.layers import layers_of
from ampwise.report.live.run_state import format_duration, format_number, format_trouble
from ampwise.report.live.sparkline import BAD, axis_of, columns_in, draw
from ampwise.report.verdict import run_mood, verdict
from ampwise.runs.bucket import NO_STATS, NumberStats

if TYPE_CHECKING:
    from rich.text import Text

    from ampwise.report.layers import LayerGradients
    from ampwise.report.live.run_state import RunState
    from ampwise.report.live.sparkline import CurveAxis
    from ampwise.runs.bucket import StepBucket
    from ampwise.runs.events import LoggedEvent
    from ampwise.runs.reader import Run
    from ampwise.runs.rows import CountedFinding

__all__ = ["TerminalSize", "draw_curves", "draw_frame"]

METRICS = ("loss", "scale", "norm")
RECENT_SAMPLES = 8  # layer samples that are summed for each frame, of hundreds
VERDICT_LINES = 2
TALL = 22  # height from which each curve has two lines
AIRY = 14  # height from which there are blank lines between the parts
LABEL, VALUE, ENDS, GAP = 7, 10, 20, 2  # characters
WIDE = 64  # width from which the ends of the axes are shown


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

        painted = "".join(paint(self._shown(text), style, bool(style)) for text, style in parts)
        line = Text.from_ansi(painted, no_wrap=True)
        line.truncate(self.width, overflow="ellipsis" if self.braille else "crop")
        return line

    def _shown(self, text: str) -> str:
        harmless = printable(text)
        return harmless if self.braille else encodable(harmless, "ascii")


def draw_frame(run: Run, now: RunState, paper: TerminalSize) -> list[Text]:
    """Draw the verdict, metrics, findings, events, and the layers that lose most; what does not fit is counted."""
    trouble = [paper.line(format_trouble(now.trouble), "warning")] if now.trouble else []
    head = [*_verdict(run, paper), paper.line(_status_line(now), "bold"), *trouble]
    pictures = draw_curves(now, paper)
    found = [*(_finding(seen, paper) for seen in now.findings), *(_event(each, paper) for each in _last_of_each(now))]
    layers = _layers(run, paper)
    blank = [paper.line("")] if paper.height >= AIRY else []
    available = paper.height - len(head) - len(pictures) - len(blank) * sum(map(bool, (pictures, found, layers)))
    for_layers = min(len(layers), max(available // 3, available - len(found)))
    blocks = [
        head,
        pictures,
        _shortened(found, available - for_layers, "findings and events" if now.events else "findings", paper),
        _shortened(layers, for_layers, "layers", paper)
        if for_layers >= min(2, len(layers))
        else [],  # no heading alone
    ]
    lines = [line for block in blocks if block for line in [*blank, *block]]
    return lines[len(blank) :][: paper.height]


def draw_curves(now: RunState, paper: TerminalSize) -> list[Text]:
    """Draw loss, scale, norm and skipped steps: their current values and curves."""
    cells = max(1, paper.width - LABEL - VALUE - 2 * GAP - (ENDS + GAP if paper.width >= WIDE else 0))
    columns = thin_out(now.line, columns_in(cells, braille=paper.braille))
    lines = []
    for metric in METRICS:
        value = now.present(metric)
        if value is not None:
            spreads = [spread_of(column, metric) for column in columns]
            style = "bold" if math.isfinite(value) else "error"
            lines += _curve(metric, format_number(value), spreads, cells, paper, style=style)
    if columns:
        share = f" ({format_percent(now.skipped / now.steps)})" if now.skipped else ""
        skips = [_skips(column) for column in columns]
        lines += _curve("skipped", f"{now.skipped:,}{share}", skips, cells, paper, rows=1)
    return lines


def _curve(
    name: str,
    value: str,
    spreads: Sequence[NumberStats],
    cells: int,
    paper: TerminalSize,
    *,
    style: str = "bold",
    rows: int | None = None,
) -> list[Text]:
    rows = rows or (2 if paper.height >= TALL and paper.braille else 1)
    axis = axis_of(spreads)
    pictures = draw(spreads, axis, rows=rows, braille=paper.braille)
    ends = _ends(axis, rows) if name != "skipped" and paper.width >= WIDE else [""] * rows
    names, values = [name, *[""] * (rows - 1)], [value, *[""] * (rows - 1)]
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


def _ends(axis: CurveAxis | None, rows: int) -> list[str]:
    if axis is None:
        return [""] * rows
    low, high = format_number(axis.low), format_number(axis.high)
    log = " log" if axis.is_log else ""
    if low == high:
        return [*[""] * (rows - 1), low]
    return [f"{low} … {high}{log}"] if rows == 1 else [high, *[""] * (rows - 2), f"{low}{log}"]


def _skips(column: StepBucket) -> NumberStats:
    """Return a bar as high as the share of skipped steps; none if no step was skipped."""
    share = column.skipped / column.count
    return NumberStats(0.0, share, share, 1) if share else NO_STATS


def _verdict(run: Run, paper: TerminalSize) -> list[Text]:
    text = printable(f"{verdict(run)}.")
    lines = textwrap.wrap(
        text, max(paper.width, 2), max_lines=VERDICT_LINES if paper.height >= TALL // 2 else 1, placeholder="…"
    )
    return [paper.line(line, run_mood(run)) for line in lines]


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


def _finding(seen: CountedFinding, paper: TerminalSize) -> Text:
    finding = seen.finding
    where = f" {finding.place}" if finding.place.as_dict() else ""
    often = f" ×{seen.count:,}" if seen.count > 1 else ""
    message = " ".join(finding.message.split())
    return paper.joined(
        (f"{finding.severity}[{finding.rule.code}]", str(finding.severity)),
        (f"{where}{often}", "bold"),
        (f"  {message}", ""),
    )


def _last_of_each(now: RunState) -> list[LoggedEvent]:
    """Return the last event of each kind, newest first."""
    last = {event.name: event for event in now.events}
    return sorted(last.values(), key=lambda event: event.step or 0, reverse=True)


def _event(event: LoggedEvent, paper: TerminalSize) -> Text:
    at = "" if event.step is None else f" step {event.step:,}"
    return paper.joined((event.name, event.level), (at, "bold"), (f"  {' '.join(event.message.split())}", ""))


def _layers(run: Run, paper: TerminalSize) -> list[Text]:
    """Draw the layers that lost gradients or had inf or NaN in the last samples."""
    found = layers_of(replace(run, layers=run.layers[-RECENT_SAMPLES:]))
    odd = [layer for layer in found if layer.lost or layer.notes]
    if not odd:
        measured = found and found[0].lost is not None
        return [paper.line(f"none of {len(found):,} layers loses gradients in FP16", "dim")] if measured else []
    heading = "lost in FP16 by layer, at least" if found[0].lost is not None else "layers to look at"
    return [paper.line(heading, "dim"), *[_layer(layer, paper) for layer in odd]]


def _layer(layer: LayerGradients, paper: TerminalSize) -> Text:
    lost = "" if layer.lost is None else f"{format_percent(layer.lost):>6}  "
    notes = f"  {', '.join(layer.notes)}" if layer.notes else ""
    return paper.joined((lost, "bold"), (layer.name, ""), (notes, "warning"))


def _shortened(lines: list[Text], most: int, what: str, paper: TerminalSize) -> list[Text]:
    if len(lines) <= most:
        return lines
    kept = max(0, most - 1)
    return [*lines[:kept], paper.line(f"… and {len(lines) - kept:,} more {what}", "dim")] if most > 0 else []
