"""A run as terminal text: verdict, findings, layers, what was fine, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ampwise.finding.terminal import paint, printable
from ampwise.report.formatting import evidence_line, format_short
from ampwise.report.layers import describe_layers, layers_headings, layers_of, layers_title
from ampwise.report.run_facts import (
    ACTIVATION_HEADINGS,
    ACTIVATIONS,
    activations_of,
    sentences,
    settings,
    steps_of,
    timing,
)
from ampwise.report.source_lines import excerpt_lines, line_number_width
from ampwise.report.text_layout import (
    GAP,
    INDENT,
    NARROWEST,
    bullets,
    finding_paragraph,
    more_line,
    text_table,
    wrap_text,
)
from ampwise.report.verdict import event_lines, is_empty_run, occurrence, opening, run_mood, worst_first
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding

__all__ = ["run_text"]

MOST_LAYERS = 12
MOST_MODULES = 12
MOST_FINDINGS = 20  # in the terminal; JSON and the page have all
MOST_EVENTS = 20


def run_text(run: Run, *, colour: bool, width: int, not_kept: str = "") -> str:
    """Return the whole text, ending in a newline.

    not_kept: if the record was not kept, a sentence on how to keep it, shown instead of its folder.
    """
    width = max(width, NARROWEST)
    where = not_kept or f"The record is in {printable(str(run.folder))}"
    first, *others = opening(run)
    start = "\n".join([paint(printable(first), run_mood(run), colour), *[wrap_text(one, width) for one in others]])
    problems = bullets("Problems with this record", run.trouble, "warning", colour=colour, width=width)
    if is_empty_run(run):
        return f"{start}\n{where}\n\n{problems}\n" if problems else f"{start}\n{where}\n"
    findings = worst_first(run.merged_findings())
    more = len(findings) - MOST_FINDINGS
    paragraphs = []
    for one in findings[:MOST_FINDINGS]:
        details = [text for text in (evidence_line(one.finding.shown_evidence), occurrence(one)) if text]
        source, margin = excerpt_lines(one, colour), line_number_width(one)
        paragraphs.append(finding_paragraph(one.finding, source, details, margin=margin, colour=colour))
    suggested = [
        wrap_text(f"{one.name}={format_short(one.value)}{f': {one.reason}' if one.reason else ''}", width, INDENT)
        for one in settings(run)
    ]
    times = [(printable(name), printable(value)) for name, value in timing(run)]
    longest = max((len(name) for name, _ in times), default=0)
    where_time_goes = [f"{INDENT}{name:{longest}}{GAP}{value}" for name, value in times]
    parts = [
        start,
        *paragraphs,
        f"… and {more:,} more findings: the page and the JSON have all of them." if more > 0 else "",
        bullets("Events", event_lines(run, MOST_EVENTS), "bold", colour=colour, width=width),
        "\n".join([paint("Suggested for the GradScaler", "bold", colour), *suggested]) if suggested else "",
        _layers(run, colour, width),
        _activations(run, colour, width),
        "\n".join([paint("Where time goes", "bold", colour), *where_time_goes]) if times else "",
        bullets("Fine", sentences(run, "what_was_fine"), "ok", colour=colour, width=width),
        bullets("Not measured", sentences(run, "not_measured"), "bold", colour=colour, width=width),
        problems,
        _next_commands(run, findings, where, colour, kept=not not_kept),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _layers(run: Run, colour: bool, width: int) -> str:
    layers = layers_of(run)
    if not layers:
        return ""
    several = len({layer.optimizer for layer in layers}) > 1
    rows = [
        [printable(layer.name_and_owner if several else layer.name), *layer.cells, ", ".join(layer.notes)]
        for layer in layers[:MOST_LAYERS]
    ]
    headings = ["layer", *layers_headings(layers), ""]
    lines = text_table(headings, rows, colour=colour, width=width)
    about = wrap_text(f"{describe_layers(layers)}.", width, INDENT)
    return "\n".join([_title(layers_title(layers), colour), about, *lines, *more_line(len(layers) - MOST_LAYERS)])


def _activations(run: Run, colour: bool, width: int) -> str:
    found = activations_of(run)
    if not found:
        return ""
    rows = [[*map(printable, one.cells), ""] for one in found[:MOST_MODULES]]
    lines = text_table([*ACTIVATION_HEADINGS, ""], rows, colour=colour, width=width)
    title = _title("Modules, worst first" if len(found) > 1 else "Modules", colour)
    about = wrap_text(f"{ACTIVATIONS}.", width, INDENT)
    return "\n".join([title, about, *lines, *more_line(len(found) - MOST_MODULES)])


def _title(text: str, colour: bool) -> str:
    name, comma, order = text.partition(",")
    return f"{paint(name, 'bold', colour)}{comma}{order}"


def _next_commands(run: Run, findings: Sequence[CountedFinding], where: str, colour: bool, *, kept: bool) -> str:
    folder = printable(shlex.quote(str(run.folder)))
    commands = {}
    if steps_of(run) and kept:
        commands[f"ampwise report {folder} -o page.html"] = "the curves and every layer, on one page"
    if findings:
        commands[f"ampwise explain {printable(findings[0].finding.rule.code)}"] = "why it matters, with an example"
    longest = max(map(len, commands), default=0)
    lines = [f"{INDENT}{command:{longest}}{GAP}{paint(what, 'dim', colour)}" for command, what in commands.items()]
    return "\n".join([where, *lines])
