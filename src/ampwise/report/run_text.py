"""A run as terminal text: verdict, findings, layers, what was fine, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.finding.terminal import paint, printable
from ampwise.report.activations import ABOUT, HEADINGS, MOST_MODULES, Activation, activations_of
from ampwise.report.event_log import event_lines
from ampwise.report.formatting import evidence_line, format_short
from ampwise.report.layers import LayerGradients, describe_layers, layers_headings, layers_of, layers_title
from ampwise.report.run_facts import sentences, settings, timing
from ampwise.report.source_lines import excerpt_lines, line_number_width
from ampwise.report.text_layout import shorten_middle, wrap_text
from ampwise.report.verdict import is_empty_run, occurrence, opening, run_mood, steps_of, worst_first

if TYPE_CHECKING:
    from ampwise.runs.reader import Run
    from ampwise.runs.rows import CountedFinding

__all__ = ["run_text"]

MOST_LAYERS = 12
MOST_FINDINGS = 20  # in the terminal; JSON and the page have all
MOST_EVENTS = 20
NARROWEST = 60  # a smaller width is a mistake in COLUMNS
SHORTEST_NAME = 16
GAP = "  "
INDENT = "  "


def run_text(run: Run, *, colour: bool, width: int, not_kept: str = "") -> str:
    """Return the whole text, ending in a newline.

    not_kept: if the record was not kept, a sentence on how to keep it, shown instead of its folder.
    """
    width = max(width, NARROWEST)
    where = not_kept or f"The record is in {printable(str(run.folder))}"
    if is_empty_run(run):
        return _without_steps(run, where, colour, width)
    findings = worst_first(run.merged_findings())
    parts = [
        _opening(run, colour, width),
        *[_paragraph(one, colour) for one in findings[:MOST_FINDINGS]],
        _more(len(findings) - MOST_FINDINGS, "findings: the page and the JSON have all of them"),
        _list("Events", event_lines(run, MOST_EVENTS), "bold", colour, width),
        _settings(run, colour, width),
        _table_of(layers_of(run), colour, width),
        _activations(activations_of(run), colour, width),
        _pairs("Where time goes", timing(run), colour),
        _list("Fine", sentences(run, "what_was_fine"), "ok", colour, width),
        _list("Not measured", sentences(run, "not_measured"), "bold", colour, width),
        _list("Problems with this record", run.trouble, "warning", colour, width),
        _next(run, findings, where, colour, kept=not not_kept),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _without_steps(run: Run, where: str, colour: bool, width: int) -> str:
    """Return the short text for a run that took no step."""
    text = f"{_opening(run, colour, width)}\n{where}"
    problems = _list("Problems with this record", run.trouble, "warning", colour, width)
    return f"{text}\n\n{problems}\n" if problems else f"{text}\n"


def _opening(run: Run, colour: bool, width: int) -> str:
    first, *others = opening(run)
    return "\n".join([paint(printable(first), run_mood(run), colour), *[wrap_text(other, width) for other in others]])


def _paragraph(counted: CountedFinding, colour: bool) -> str:
    finding = counted.finding
    margin = " " * line_number_width(counted)
    mark = f"{margin} {paint('=', 'gutter', colour)}"
    head = paint(f"{finding.severity}[{finding.rule.code}]", finding.severity, colour)
    where = f"{margin}{paint('-->', 'gutter', colour)} {printable(str(finding.place))}"
    details = [printable(text) for text in (evidence_line(finding.shown_evidence), occurrence(counted)) if text]
    lines = [
        f"{head} {paint(printable(finding.rule.name), 'bold', colour)}: {_block(finding.message, 2)}",
        *([where] if finding.place.as_dict() else []),
        *excerpt_lines(counted, colour),
        *[f"{mark} {text}" for text in details],
        f"{paint('help', 'help', colour)}: {_block(finding.fix, 6)}",
    ]
    return "\n".join(lines)


def _settings(run: Run, colour: bool, width: int) -> str:
    found = settings(run)
    if not found:
        return ""
    lines = [
        wrap_text(f"{one.name}={format_short(one.value)}{f': {one.reason}' if one.reason else ''}", width, INDENT)
        for one in found
    ]
    return "\n".join([paint("Suggested for the GradScaler", "bold", colour), *lines])


def _table_of(layers: list[LayerGradients], colour: bool, width: int) -> str:
    if not layers:
        return ""
    shown = layers[:MOST_LAYERS]
    several = len({layer.optimizer for layer in layers}) > 1
    rows = [_row(layer, several) for layer in shown]
    lines = [
        _titled(layers_title(layers), colour),
        wrap_text(f"{describe_layers(layers)}.", width, INDENT),
        *_table(["layer", *layers_headings(layers), ""], rows, colour, width - len(INDENT)),
        *_left_out(len(layers) - len(shown)),
    ]
    return "\n".join(lines)


def _row(layer: LayerGradients, several: bool) -> list[str]:
    name = layer.name_and_owner if several else layer.name
    return [printable(name), *layer.cells, ", ".join(layer.notes)]


def _activations(found: list[Activation], colour: bool, width: int) -> str:
    if not found:
        return ""
    rows = [[*map(printable, one.cells), ""] for one in found[:MOST_MODULES]]
    lines = [
        _titled("Modules, worst first" if len(found) > 1 else "Modules", colour),
        wrap_text(f"{ABOUT}.", width, INDENT),
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
    """Return the lines of a table: the first column left-aligned and as wide as fits, numbers right-aligned."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    available = width - sum(widths[1:]) - len(GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(available, SHORTEST_NAME))

    def line(row: list[str]) -> str:
        name = shorten_middle(row[0], widths[0])
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
    return "\n".join([paint(title, style, colour), *[wrap_text(f"- {line}", width, INDENT, hang=2) for line in lines]])


def _next(run: Run, findings: Sequence[CountedFinding], where: str, colour: bool, *, kept: bool) -> str:
    folder = printable(shlex.quote(str(run.folder)))
    commands = {}
    if steps_of(run) and kept:
        commands[f"ampwise report {folder} -o page.html"] = "the curves and every layer, on one page"
    if findings:
        commands[f"ampwise explain {printable(findings[0].finding.rule.code)}"] = "why it matters, with an example"
    longest = max(map(len, commands), default=0)
    lines = [f"{INDENT}{command:{longest}}{GAP}{paint(what, 'dim', colour)}" for command, what in commands.items()]
    return "\n".join([where, *lines])


def _more(number: int, what: str) -> str:
    return f"… and {number:,} more {what}." if number > 0 else ""


def _block(text: str, indent: int) -> str:
    """Return a text of several lines, indented after the first so that no line looks like the start of a finding."""
    return f"\n{'':{indent}}".join(printable(line) for line in text.split("\n"))
