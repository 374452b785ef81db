"""Show a comparison on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding.terminal import console, printable, table
from ampwise.rules.amp5xx_speed.verdict import KIND_WORDS
from ampwise.tune.compare.speed_text import (
    clock_note,
    columns_of,
    kept_note,
    layer_note,
    problems,
    setup_text,
    speed_headline,
    split_of,
)
from ampwise.tune.compare.speeds import BASE, LayerTime, PrecisionRow, SpeedComparison

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ampwise.finding import Finding
    from ampwise.tune.compare.result import PrecisionComparison

__all__ = ["comparison_text", "show"]

MOST_LAYERS = 12
TO_THE_LEFT = ("precision", "verdict")
STYLES = {"definitely": "green", "use": "green", "optional": "yellow", "stay": "", "noise": "dim"}


def comparison_text(result: PrecisionComparison) -> str:
    """Render the whole comparison without colour."""
    out = console(io.StringIO())
    with out.capture() as captured:
        show(out, result)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def show(out: Console, result: PrecisionComparison) -> None:
    """Print the verdict first, then the numbers behind it."""
    speeds = result.speeds
    _say(out, f"{speeds.subject} on {setup_text(speeds)}", style="dim")
    _say(out, speed_headline(speeds), style="bold")
    out.print()
    out.print(_rows(speeds))
    for line in problems(speeds):
        _say(out, line, style="yellow")
    profiled = [row for row in speeds.rows if row.split is not None]
    if profiled:
        out.print()
        out.print(_splits(profiled))
    if speeds.layers:
        out.print()
        out.print(_layers(speeds))
    for finding in result.findings:
        out.print()
        _show_finding(out, finding)
    notes = _notes(speeds)
    if notes:
        out.print()
    for sentence in notes:
        _say(out, sentence, style="dim")


def _rows(speeds: SpeedComparison) -> Table:
    columns = columns_of(speeds)
    shown = table()
    for column in columns:
        left = column.heading in TO_THE_LEFT
        shown.add_column(column.heading, justify="left" if left else "right", no_wrap=True)
    for row in speeds.rows:
        cells = [printable(column.cell(row, speeds)) for column in columns]
        verdict = speeds.verdict(row)
        shown.add_row(*map(_plain, cells), style=STYLES.get(str(verdict), "") or None)
    return shown


def _splits(rows: list[PrecisionRow]) -> Table:
    """Tabulate how each step's time splits by kind of work."""
    shares = {row.label: split_of(row) for row in rows}
    kinds = [kind for kind in KIND_WORDS if any(kind in split for split in shares.values())]
    shown = table("time of a step")
    for kind in kinds:
        shown.add_column(KIND_WORDS[kind], justify="right", no_wrap=False)
    for label, split in shares.items():
        shown.add_row(label, *(f"{split[kind]:.0%}" if kind in split else "-" for kind in kinds))
    return shown


def _layers(speeds: SpeedComparison) -> Table:
    labels = [label for label in speeds.layers[0].seconds if label != BASE]
    shown = table("layers", "class")
    shown.add_column("", justify="right")
    for heading in (BASE, *labels):
        shown.add_column(heading, justify="right")
    for layer in speeds.layers[:MOST_LAYERS]:
        shown.add_row(*map(_plain, _layer_cells(layer, labels)))
    if len(speeds.layers) > MOST_LAYERS:
        shown.add_row(f"… and {len(speeds.layers) - MOST_LAYERS} more")
    return shown


def _layer_cells(layer: LayerTime, labels: list[str]) -> Iterator[str]:
    yield printable(layer.name)
    yield printable(layer.kind)
    yield f"×{layer.times}" if layer.times > 1 else ""
    yield f"{1e3 * layer.seconds[BASE]:.3g} ms" if BASE in layer.seconds else ""
    for label in labels:
        yield layer_note(layer, label)


def _show_finding(out: Console, finding: Finding) -> None:
    _say(out, f"{finding.rule.code} {finding.rule.name}: {finding.message}")
    _say(out, f"  fix: {finding.fix}")
    if "experiment" in finding.evidence:
        _say(out, f"  try: {finding.evidence['experiment']}")


def _notes(speeds: SpeedComparison) -> list[str]:
    return [note for note in (kept_note(speeds), clock_note(speeds), *speeds.not_measured) if note]


def _say(out: Console, text: str, style: str = "") -> None:
    out.print(printable(text), style=style, markup=False, soft_wrap=True)


def _plain(text: str) -> Text:
    from rich.text import Text

    return Text(text)  # a name is not markup
