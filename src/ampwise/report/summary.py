"""A run in the terminal: the verdict, what was found, the layers, what was fine, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.printers.terminal import paint, printable
from ampwise.report.activations import ABOUT, HEADINGS, MOST_MODULES, Activation, activations_of
from ampwise.report.facts import sentences, settings, timing
from ampwise.report.fitting import cropped, wrapped
from ampwise.report.layers import Layer, about_layers, headings, layers_of, title
from ampwise.report.source_lines import drawn_lines, gutter_of
from ampwise.report.verdict import happened, mood, nothing_seen, opening, steps_of, worst_first
from ampwise.report.wording import one_line, short

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


def summary(run: Run, *, colour: bool, width: int, not_kept: str = "") -> str:
    """The whole text, ending in a newline. not_kept: of a record that is gone, how one keeps it, instead of where."""
    width = max(width, NARROWEST)
    where = not_kept or f"The record is in {printable(str(run.folder))}"
    if nothing_seen(run):
        return _short_of_steps(run, where, colour, width)
    seen = worst_first(run.merged_findings())
    parts = [
        _opening(run, colour, width),
        *[_paragraph(one, colour) for one in seen[:MOST_FINDINGS]],
        _more(len(seen) - MOST_FINDINGS, "findings: the page and the JSON have all of them"),
        _settings(run, colour, width),
        _table_of(layers_of(run), colour, width),
        _activations(activations_of(run), colour, width),
        _pairs("Where time goes", timing(run), colour),
        _list("Fine", sentences(run, "what_was_fine"), "ok", colour, width),
        _list("Not measured", sentences(run, "not_measured"), "bold", colour, width),
        _list("Trouble with this record", run.trouble, "warning", colour, width),
        _next(run, seen, where, colour, kept=not not_kept),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _short_of_steps(run: Run, where: str, colour: bool, width: int) -> str:
    """Of a run that took no step, there is little to say."""
    told = f"{_opening(run, colour, width)}\n{where}"
    trouble = _list("Trouble with this record", run.trouble, "warning", colour, width)
    return f"{told}\n\n{trouble}\n" if trouble else f"{told}\n"


def _opening(run: Run, colour: bool, width: int) -> str:
    first, *others = opening(run)
    return "\n".join([paint(printable(first), mood(run), colour), *[wrapped(other, width) for other in others]])


def _paragraph(seen: Seen, colour: bool) -> str:
    finding = seen.finding
    margin = " " * gutter_of(seen)
    mark = f"{margin} {paint('=', 'gutter', colour)}"
    head = paint(f"{finding.severity}[{finding.rule.code}]", finding.severity, colour)
    where = f"{margin}{paint('-->', 'gutter', colour)} {printable(str(finding.place))}"
    told = [printable(text) for text in (one_line(finding.shown_evidence), happened(seen)) if text]
    lines = [
        f"{head} {paint(printable(finding.rule.name), 'bold', colour)}: {_block(finding.message, 2)}",
        *([where] if finding.place.as_dict() else []),
        *drawn_lines(seen, colour),
        *[f"{mark} {text}" for text in told],
        f"{paint('help', 'help', colour)}: {_block(finding.fix, 6)}",
    ]
    return "\n".join(lines)


def _settings(run: Run, colour: bool, width: int) -> str:
    found = settings(run)
    if not found:
        return ""
    lines = [
        wrapped(f"{one.name}={short(one.value)}{f': {one.reason}' if one.reason else ''}", width, INDENT)
        for one in found
    ]
    return "\n".join([paint("Suggested for the GradScaler", "bold", colour), *lines])


def _table_of(layers: list[Layer], colour: bool, width: int) -> str:
    if not layers:
        return ""
    shown = layers[:MOST_LAYERS]
    several = len({layer.optimizer for layer in layers}) > 1
    rows = [_row(layer, several) for layer in shown]
    lines = [
        _titled(title(layers), colour),
        wrapped(f"{about_layers(layers)}.", width, INDENT),
        *_table(["layer", *headings(layers), ""], rows, colour, width - len(INDENT)),
        *_left_out(len(layers) - len(shown)),
    ]
    return "\n".join(lines)


def _row(layer: Layer, several: bool) -> list[str]:
    name = layer.name_and_owner if several else layer.name
    return [printable(name), *layer.cells, ", ".join(layer.notes)]


def _activations(found: list[Activation], colour: bool, width: int) -> str:
    if not found:
        return ""
    rows = [[*map(printable, one.cells), ""] for one in found[:MOST_MODULES]]
    lines = [
        _titled("Modules, worst first" if len(found) > 1 else "Modules", colour),
        wrapped(f"{ABOUT}.", width, INDENT),
        *_table([*HEADINGS, ""], rows, colour, width - len(INDENT)),
        *_left_out(len(found) - MOST_MODULES),
    ]
    return "\n".join(lines)


def _titled(text: str, colour: bool) -> str:
    name, comma, order = text.partition(",")
    return f"{paint(name, 'bold', colour)}{comma}{order}"


def _left_out(number: int) -> list[str]:
    return [f"{INDENT}… and {number:,} more"] if number > 0 else []


def _table(headings: list[str], rows: list[list[str]], colour: bool, width: int) -> list[str]:
    """The first column to the left and as wide as there is room, numbers to the right."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    room = width - sum(widths[1:]) - len(GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, SHORTEST_NAME))

    def line(row: list[str]) -> str:
        name = cropped(row[0], widths[0])
        numbers = [" " * (space - cell_len(cell)) + cell for cell, space in zip(row[1:-1], widths[1:-1], strict=True)]
        return GAP.join([name + " " * (widths[0] - cell_len(name)), *numbers, row[-1]]).rstrip()

    return [f"{INDENT}{paint(line(headings), 'dim', colour)}", *[f"{INDENT}{line(row)}" for row in rows]]


def _pairs(title: str, pairs: Sequence[tuple[str, str]], colour: bool) -> str:
    if not pairs:
        return ""
    longest = max(len(printable(name)) for name, _ in pairs)
    lines = [f"{INDENT}{printable(name):{longest}}{GAP}{printable(value)}" for name, value in pairs]
    return "\n".join([paint(title, "bold", colour), *lines])


def _list(title: str, lines: Sequence[str], style: str, colour: bool, width: int) -> str:
    if not lines:
        return ""
    return "\n".join([paint(title, style, colour), *[wrapped(f"- {line}", width, INDENT, hang=2) for line in lines]])


def _next(run: Run, seen: Sequence[Seen], where: str, colour: bool, *, kept: bool) -> str:
    folder = printable(shlex.quote(str(run.folder)))
    commands = {}
    if steps_of(run) and kept:
        commands[f"ampwise report {folder} -o page.html"] = "the curves and every layer, on one page"
    if seen:
        commands[f"ampwise explain {printable(seen[0].finding.rule.code)}"] = "why it matters, with an example"
    longest = max(map(len, commands), default=0)
    lines = [f"{INDENT}{command:{longest}}{GAP}{paint(what, 'dim', colour)}" for command, what in commands.items()]
    return "\n".join([where, *lines])


def _more(number: int, what: str) -> str:
    return f"… and {number:,} more {what}." if number > 0 else ""


def _block(text: str, indent: int) -> str:
    """A text of several lines, the later ones indented so that none looks like the start of a finding."""
    return f"\n{'':{indent}}".join(printable(line) for line in text.split("\n"))
