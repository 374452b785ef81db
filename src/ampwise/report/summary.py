"""A run in the terminal: the verdict, what was found, the layers, what was fine, and what to do next."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.printers.terminal import paint, printable
from ampwise.report.facts import one_line, sentences, settings, short, timing
from ampwise.report.layers import Layer, about_layers, layers_of, percent
from ampwise.report.source_lines import drawn_lines, gutter_of
from ampwise.report.verdict import ending, happened, verdict, worst_first

if TYPE_CHECKING:
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen

__all__ = ["summary"]

MOST_LAYERS = 12
MOST_FINDINGS = 20  # in the terminal; JSON and the page have all
NARROWEST = 60  # a terminal of two columns is a mistake in COLUMNS
SHORTEST_NAME = 16
GAP = "  "
INDENT = "  "


def summary(run: Run, *, colour: bool, width: int) -> str:
    """The whole text, ending in a newline."""
    width = max(width, NARROWEST)
    seen = worst_first(run.merged_findings())
    layers = layers_of(run)
    parts = [
        _opening(run, seen, colour, width),
        *[_paragraph(one, colour) for one in seen[:MOST_FINDINGS]],
        _more(len(seen) - MOST_FINDINGS, "findings: the page and the JSON have all of them"),
        _settings(run, colour, width),
        _table_of(layers, colour, width),
        _pairs("Where time goes", timing(run), colour),
        _list("Fine", sentences(run, "what_was_fine"), "ok", colour, width),
        _list("Not measured", sentences(run, "not_measured"), "bold", colour, width),
        _list("Trouble with this record", run.trouble, "warning", colour, width),
        _next(run, seen, colour),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _opening(run: Run, seen: Sequence[Seen], colour: bool, width: int) -> str:
    style = str(seen[0].finding.severity) if seen else "ok"
    lines = [paint(f"{printable(verdict(run))}.", style, colour)]
    how = ending(run)
    return "\n".join([*lines, *([_wrapped(how, width)] if how else [])])


def _paragraph(seen: Seen, colour: bool) -> str:
    finding = seen.finding
    margin = " " * gutter_of(seen)
    mark = f"{margin} {paint('=', 'gutter', colour)}"
    head = paint(f"{finding.severity}[{finding.rule.code}]", finding.severity, colour)
    where = f"{margin}{paint('-->', 'gutter', colour)} {printable(str(finding.place))}"
    lines = [
        f"{head} {paint(printable(finding.rule.name), 'bold', colour)}: {_block(finding.message, 2)}",
        *([where] if finding.place.as_dict() else []),
        *drawn_lines(seen, colour),
        *([f"{mark} {printable(one_line(finding.evidence))}"] if finding.evidence else []),
        f"{mark} {happened(seen)}",
        f"{paint('help', 'help', colour)}: {_block(finding.fix, 6)}",
    ]
    return "\n".join(lines)


def _settings(run: Run, colour: bool, width: int) -> str:
    found = settings(run)
    if not found:
        return ""
    lines = [
        _wrapped(f"{one.name}={short(one.value)}{f': {one.reason}' if one.reason else ''}", width, INDENT)
        for one in found
    ]
    return "\n".join([paint("Suggested for the GradScaler", "bold", colour), *lines])


def _table_of(layers: list[Layer], colour: bool, width: int) -> str:
    if not layers:
        return ""
    shown = layers[:MOST_LAYERS]
    several = len({layer.optimizer for layer in layers}) > 1
    rows = [_row(layer, several) for layer in shown]
    more = len(layers) - len(shown)
    lines = [
        paint("Layers", "bold", colour) + (", worst first" if len(layers) > 1 else ""),
        _wrapped(f"{about_layers(layers)}.", width, INDENT),
        *_table(["layer", "values", "norm", "largest", "lost", "subnormal", ""], rows, colour, width - len(INDENT)),
        *([f"{INDENT}… and {more:,} more"] if more else []),
    ]
    return "\n".join(lines)


def _row(layer: Layer, several: bool) -> list[str]:
    name = f"{layer.name} (optimizer {layer.optimizer})" if several else layer.name
    numbers = [percent(layer.share), f"{layer.norm:.3g}", f"{layer.census.amax:.3g}"]
    return [printable(name), *numbers, percent(layer.lost), percent(layer.subnormal), ", ".join(layer.notes)]


def _table(headings: list[str], rows: list[list[str]], colour: bool, width: int) -> list[str]:
    """The first column to the left and as wide as there is room, numbers to the right."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    room = width - sum(widths[1:]) - len(GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, SHORTEST_NAME))

    def line(row: list[str]) -> str:
        name = _cropped(row[0], widths[0])
        numbers = [" " * (space - cell_len(cell)) + cell for cell, space in zip(row[1:-1], widths[1:-1], strict=True)]
        return GAP.join([name + " " * (widths[0] - cell_len(name)), *numbers, row[-1]]).rstrip()

    return [f"{INDENT}{paint(line(headings), 'dim', colour)}", *[f"{INDENT}{line(row)}" for row in rows]]


def _cropped(name: str, width: int) -> str:
    """A long name without its middle: the start says which block, the end which weight."""
    from rich.cells import cell_len, chop_cells, set_cell_size

    if cell_len(name) <= width:
        return name
    tail = "".join(reversed(chop_cells(name[::-1], (width - 1) // 2)[0]))
    return set_cell_size(name, width - 1 - cell_len(tail)).rstrip() + "…" + tail


def _pairs(title: str, pairs: Sequence[tuple[str, str]], colour: bool) -> str:
    if not pairs:
        return ""
    longest = max(len(printable(name)) for name, _ in pairs)
    lines = [f"{INDENT}{printable(name):{longest}}{GAP}{printable(value)}" for name, value in pairs]
    return "\n".join([paint(title, "bold", colour), *lines])


def _list(title: str, lines: Sequence[str], style: str, colour: bool, width: int) -> str:
    if not lines:
        return ""
    return "\n".join([paint(title, style, colour), *[_wrapped(f"- {line}", width, INDENT, hang=2) for line in lines]])


def _next(run: Run, seen: Sequence[Seen], colour: bool) -> str:
    folder = printable(shlex.quote(str(run.folder)))
    commands = {f"ampwise report {folder} --html page.html": "the curves and every layer, on one page"}
    if seen:
        commands[f"ampwise explain {printable(seen[0].finding.rule.code)}"] = "why it matters, with an example"
    longest = max(map(len, commands))
    lines = [f"{INDENT}{command:{longest}}{GAP}{paint(what, 'dim', colour)}" for command, what in commands.items()]
    return "\n".join([f"The record is in {printable(str(run.folder))}", *lines])


def _more(number: int, what: str) -> str:
    return f"… and {number:,} more {what}." if number > 0 else ""


def _wrapped(text: str, width: int, indent: str = "", hang: int = 4) -> str:
    """A sentence over as many lines as it takes; a word longer than a line, such as a path, stays whole."""
    after = indent + " " * hang if indent else ""
    return textwrap.fill(
        printable(text),
        width,
        initial_indent=indent,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _block(text: str, indent: int) -> str:
    """A text of several lines, the later ones indented so that none looks like the start of a finding."""
    return f"\n{'':{indent}}".join(printable(line) for line in text.split("\n"))
