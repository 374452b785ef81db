"""What the terminal shows at a moment, in as many lines as it has and none longer than it is wide."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ampwise.live.spark import BAD, axis_of, columns_in, drawn
from ampwise.live.state import lasting, number_words, trouble_words
from ampwise.printers.terminal import encodable, paint, printable
from ampwise.record.bucket import NOTHING, Spread
from ampwise.report.curves import spread_of, thinned
from ampwise.report.layers import layers_of
from ampwise.report.verdict import mood, verdict
from ampwise.report.wording import percent

if TYPE_CHECKING:
    from rich.text import Text

    from ampwise.live.spark import Axis
    from ampwise.live.state import Now
    from ampwise.record.bucket import Bucket
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen
    from ampwise.report.layers import Layer

__all__ = ["Paper", "curves", "frame"]

METRICS = ("loss", "scale", "norm")
RECENT_SAMPLES = 8  # of the layers: what is lost now, and no sum over hundreds of samples for every frame
VERDICT_LINES = 2
TALL = 22  # lines, from which on each curve has two,
AIRY = 14  # and from which on there is a blank one between the parts
LABEL, VALUE, ENDS, GAP = 7, 10, 20, 2  # characters
WIDE = 64  # characters, from which on the ends of an axis have room


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What is drawn on: its size, and what it can show."""

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
        """One line: harmless, in characters that there are, cut where the paper ends."""
        return self.joined((text, style))

    def joined(self, *parts: tuple[str, str]) -> Text:
        """A line of several styles."""
        from rich.text import Text

        painted = "".join(paint(self._shown(text), style, bool(style)) for text, style in parts)
        line = Text.from_ansi(painted, no_wrap=True)
        line.truncate(self.width, overflow="ellipsis" if self.braille else "crop")
        return line

    def _shown(self, text: str) -> str:
        harmless = printable(text)
        return harmless if self.braille else encodable(harmless, "ascii")


def frame(run: Run, now: Now, paper: Paper) -> list[Text]:
    """The verdict, the numbers, the findings, the layers that lose most; what has no room is counted."""
    trouble = [paper.line(trouble_words(now.trouble), "warning")] if now.trouble else []
    head = [*_verdict(run, paper), paper.line(_standing(now), "bold"), *trouble]
    pictures = curves(now, paper)
    found = [_finding(seen, paper) for seen in now.findings]
    layers = _layers(run, paper)
    blank = [paper.line("")] if paper.height >= AIRY else []
    room = paper.height - len(head) - len(pictures) - len(blank) * sum(map(bool, (pictures, found, layers)))
    for_layers = min(len(layers), max(room // 3, room - len(found)))
    blocks = [
        head,
        pictures,
        _shortened(found, room - for_layers, "findings", paper),
        _shortened(layers, for_layers, "layers", paper)
        if for_layers >= min(2, len(layers))
        else [],  # no heading alone
    ]
    lines = [line for block in blocks if block for line in [*blank, *block]]
    return lines[len(blank) :][: paper.height]


def curves(now: Now, paper: Paper) -> list[Text]:
    """Loss, scale, norm and skipped steps: what they are now, and how they went."""
    cells = max(1, paper.width - LABEL - VALUE - 2 * GAP - (ENDS + GAP if paper.width >= WIDE else 0))
    columns = thinned(now.line, columns_in(cells, braille=paper.braille))
    lines = []
    for metric in METRICS:
        value = now.present(metric)
        if value is not None:
            spreads = [spread_of(column, metric) for column in columns]
            style = "bold" if math.isfinite(value) else "error"
            lines += _curve(metric, number_words(value), spreads, cells, paper, style=style)
    if columns:
        share = f" ({percent(now.skipped / now.steps)})" if now.skipped else ""
        skips = [_skips(column) for column in columns]
        lines += _curve("skipped", f"{now.skipped:,}{share}", skips, cells, paper, rows=1)
    return lines


def _curve(
    name: str,
    value: str,
    spreads: Sequence[Spread],
    cells: int,
    paper: Paper,
    *,
    style: str = "bold",
    rows: int | None = None,
) -> list[Text]:
    rows = rows or (2 if paper.height >= TALL and paper.braille else 1)
    axis = axis_of(spreads)
    pictures = drawn(spreads, axis, rows=rows, braille=paper.braille)
    ends = _ends(axis, rows) if name != "skipped" and paper.width >= WIDE else [""] * rows
    names, values = [name, *[""] * (rows - 1)], [value, *[""] * (rows - 1)]
    return [
        paper.joined(
            (f"{label:{LABEL + GAP}}", "dim"),
            (f"{number:>{VALUE}}", style),
            (" " * GAP, ""),
            *[(cell, "error" if cell == BAD else "mended") for cell in picture],
            (" " * (cells - len(picture) + GAP) + end if end else "", "dim"),
        )
        for label, number, picture, end in zip(names, values, pictures, ends, strict=True)
    ]


def _ends(axis: Axis | None, rows: int) -> list[str]:
    if axis is None:
        return [""] * rows
    low, high = number_words(axis.low), number_words(axis.high)
    log = " log" if axis.is_log else ""
    if low == high:
        return [*[""] * (rows - 1), low]
    return [f"{low} … {high}{log}"] if rows == 1 else [high, *[""] * (rows - 2), f"{low}{log}"]


def _skips(column: Bucket) -> Spread:
    """A bar as high as the share of skipped steps; none where none was."""
    share = column.skipped / column.count
    return Spread(0.0, share, share, 1) if share else NOTHING


def _verdict(run: Run, paper: Paper) -> list[Text]:
    text = printable(f"{verdict(run)}.")
    lines = textwrap.wrap(
        text, max(paper.width, 2), max_lines=VERDICT_LINES if paper.height >= TALL // 2 else 1, placeholder="…"
    )
    return [paper.line(line, mood(run)) for line in lines]


def _standing(now: Now) -> str:
    """``step 1,234 · 12.3 steps/s · running 3 min``."""
    how_long = "" if now.seconds is None else lasting(now.seconds)
    status = (
        f"{now.status} {how_long}" if now.status == "running" else f"{now.status}{how_long and f' after {how_long}'}"
    )
    told = [
        f"step {now.step:,}{now.owner and f' of {now.owner}'}" if now.line else "no step yet",
        "" if now.steps_per_s is None else f"{now.steps_per_s:,.3g} steps/s",
        status.strip(),
        "" if now.quiet_s is None else f"nothing written for {lasting(now.quiet_s)}",
    ]
    return " · ".join(part for part in told if part)


def _finding(seen: Seen, paper: Paper) -> Text:
    finding = seen.finding
    where = f" {finding.place}" if finding.place.as_dict() else ""
    often = f" ×{seen.count:,}" if seen.count > 1 else ""
    message = " ".join(finding.message.split())
    return paper.joined(
        (f"{finding.severity}[{finding.rule.code}]", str(finding.severity)),
        (f"{where}{often}", "bold"),
        (f"  {message}", ""),
    )


def _layers(run: Run, paper: Paper) -> list[Text]:
    """Those that lose something, or hold what is not finite; by the last samples."""
    found = layers_of(replace(run, layers=run.layers[-RECENT_SAMPLES:]))
    odd = [layer for layer in found if layer.lost or layer.notes]
    if not odd:
        measured = found and found[0].lost is not None
        return [paper.line(f"none of {len(found):,} layers loses gradients in FP16", "dim")] if measured else []
    heading = "lost in FP16, estimated, by layer" if found[0].lost is not None else "layers to look at"
    return [paper.line(heading, "dim"), *[_layer(layer, paper) for layer in odd]]


def _layer(layer: Layer, paper: Paper) -> Text:
    lost = "" if layer.lost is None else f"{percent(layer.lost):>6}  "
    notes = f"  {', '.join(layer.notes)}" if layer.notes else ""
    return paper.joined((lost, "bold"), (layer.name, ""), (notes, "warning"))


def _shortened(lines: list[Text], most: int, what: str, paper: Paper) -> list[Text]:
    if len(lines) <= most:
        return lines
    kept = max(0, most - 1)
    return [*lines[:kept], paper.line(f"… and {len(lines) - kept:,} more {what}", "dim")] if most > 0 else []
