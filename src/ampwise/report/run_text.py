"""A run as terminal text: how many problems, each with cause, evidence and fix, and what to do next.

Layers, modules, times, suggested settings, what was fine and what was not measured are for ``verbose``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ampwise.finding.terminal import paint, printable
from ampwise.report.formatting import evidence_line, format_short
from ampwise.report.impact import computed_impact
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
from ampwise.report.source_lines import recorded_excerpt
from ampwise.report.text_layout import (
    GAP,
    INDENT,
    NARROWEST,
    bullets,
    finding_paragraph,
    more_line,
    path_from_here,
    place_text,
    text_table,
    wrap_text,
)
from ampwise.report.verdict import event_lines, is_empty_run, occurrence, opening, run_mood, worst_first
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding

WIDEST = 119  # longer lines of prose are hard to read
MOST_LAYERS = 12
MOST_MODULES = 12
NOTABLE = 0.001  # of a layer's gradients lost or subnormal
MOST_FINDINGS = 20  # in the terminal; JSON and the page have all
MOST_EVENTS, MOST_EVENTS_VERBOSE = 5, 20
MOST_PLACES = 6  # further places of a finding
IN_IMPACT = ("limit",)  # evidence that the impact repeats
IN_NEXT = ("capsule",)  # evidence that the commands at the end repeat
# Evidence of a traced step: torch's name of the operation, and how it was replayed; and what the message says.
FOR_VERBOSE = ("op", "note", "held", "parameters", "model", "backward_passes")


def run_text(run: Run, *, colour: bool, width: int, not_kept: str = "", verbose: bool = False) -> str:
    """Return the whole text, ending in a newline.

    not_kept: if the record was not kept, a sentence on how to keep it, shown instead of its folder.
    """
    width = max(width, NARROWEST)
    where = not_kept or f"The record is in {printable(path_from_here(str(run.folder)))}"
    first, *others = opening(run)
    start = "\n".join([paint(printable(first), run_mood(run), colour), *[wrap_text(one, width) for one in others]])
    problems = bullets("Problems with this record", run.trouble, "warning", colour=colour, width=width)
    if is_empty_run(run):
        return f"{start}\n{where}\n\n{problems}\n" if problems else f"{start}\n{where}\n"
    findings = worst_first(run.merged_findings())
    groups: dict[tuple[str, str], list[CountedFinding]] = {}  # findings of a rule with the same fix are one paragraph
    for one in findings:
        groups.setdefault((one.finding.rule.code, one.finding.fix), []).append(one)
    more = sum(map(len, list(groups.values())[MOST_FINDINGS:]))
    events = event_lines(run, MOST_EVENTS_VERBOSE if verbose else MOST_EVENTS)
    parts = [
        start,
        *[_finding(run, alike, colour, min(width, WIDEST), verbose) for alike in list(groups.values())[:MOST_FINDINGS]],
        f"… and {more:,} more findings: the page and the JSON have all of them." if more else "",
        bullets("Events", events, "bold", colour=colour, width=width),
        *(_details(run, colour, width) if verbose else []),
        problems,
        _next_commands(run, findings, where, colour, kept=not not_kept, verbose=verbose),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _finding(run: Run, alike: Sequence[CountedFinding], colour: bool, width: int, verbose: bool) -> str:
    """Return the paragraph of a finding, and of findings at other places that the same fix is for."""
    first, *others = alike
    evidence, impact = first.finding.shown_evidence, computed_impact(first, run)
    hidden = (*(() if verbose else FOR_VERBOSE), *(IN_IMPACT if impact else ()), *IN_NEXT)
    details = [impact, evidence_line({name: evidence[name] for name in evidence if name not in hidden})]
    if first.consequences:
        # Without what it says of the cause, after the colon: that is known now.
        said = [(one.finding.message.partition(": ")[0], one.finding.rule.code) for one in first.consequences]
        explained = [f"{what} ({code})" for what, code in said]
        details.append(f"this also explains: {'; '.join(explained)}")
    if others:
        places = ", ".join(filter(None, (place_text(one.finding.place) for one in others[:MOST_PLACES])))
        more = f" and {len(others) - MOST_PLACES:,} more" if len(others) > MOST_PLACES else ""
        details.append(f"also {len(others):,} more of these{f', at {places}{more}' if places else ''}")
    return finding_paragraph(
        first.finding,
        where=", ".join(filter(None, (place_text(first.finding.place), occurrence(first)))),
        source=recorded_excerpt(first, colour),
        details=filter(None, details),
        colour=colour,
        width=width,
    )


def _details(run: Run, colour: bool, width: int) -> list[str]:
    suggested = [
        wrap_text(f"{one.name}={format_short(one.value)}{f': {one.reason}' if one.reason else ''}", width, INDENT)
        for one in settings(run)
    ]
    times = [(printable(name), printable(value)) for name, value in timing(run) if value not in ("0.0%", "0")]
    longest = max((len(name) for name, _ in times), default=0)
    where_time_goes = [f"{INDENT}{name:{longest}}{GAP}{value}" for name, value in times]
    return [
        "\n".join([paint("Suggested for the GradScaler", "bold", colour), *suggested]) if suggested else "",
        _layers(run, colour, width),
        _activations(run, colour, width),
        "\n".join([paint("Where time goes", "bold", colour), *where_time_goes]) if times else "",
        bullets("Fine", sentences(run, "what_was_fine"), "ok", colour=colour, width=width),
        bullets("Not measured", sentences(run, "not_measured"), "bold", colour=colour, width=width),
    ]


def _layers(run: Run, colour: bool, width: int) -> str:
    every = layers_of(run)
    layers = [each for each in every if max(each.lost or 0, each.subnormal or 0) >= NOTABLE or each.notes]
    if not every:
        return ""
    if not layers:
        norms = [each.norm for each in every]
        fine = f"all {len(every):,} look fine, with gradient norms from {min(norms):.2g} to {max(norms):.2g}"
        return f"{paint('Layers', 'bold', colour)}: {fine}"
    several = len({layer.optimizer for layer in layers}) > 1
    rows = [
        [printable(layer.name_and_owner if several else layer.name), *layer.cells, ", ".join(layer.notes)]
        for layer in layers[:MOST_LAYERS]
    ]
    headings = ["layer", *layers_headings(layers), ""]
    lines = text_table(headings, rows, colour=colour, width=width)
    about = wrap_text(f"{describe_layers(layers)}.", width, INDENT)
    rest = f"{INDENT}… and {len(layers) - MOST_LAYERS:,} more" if len(layers) > MOST_LAYERS else ""
    others = len(every) - len(layers)
    fine = f"{INDENT}The other {f'{others:,} look' if others > 1 else 'one looks'} fine." if others > 0 else ""
    return "\n".join(filter(None, [_title(layers_title(layers), colour), about, *lines, rest, fine]))


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


def _next_commands(
    run: Run, findings: Sequence[CountedFinding], where: str, colour: bool, *, kept: bool, verbose: bool
) -> str:
    def quoted(path: str) -> str:
        return printable(shlex.quote(path_from_here(path)))

    commands = {}
    fixable = [one for one in findings if one.diff and one.diff_is_safe and one.finding.place.file]
    if fixable:
        files = dict.fromkeys(quoted(one.finding.place.file or "") for one in fixable)
        codes = dict.fromkeys(printable(one.finding.rule.code) for one in fixable)
        commands[f"ampwise check --fix {' '.join(files)}"] = f"fixes {', '.join(codes)}"
    elif findings:
        commands[f"ampwise explain {printable(findings[0].finding.rule.code)}"] = "why it matters, with an example"
    saved = [str(one.finding.evidence["capsule"]) for one in findings if one.finding.evidence.get("capsule")]
    if saved:
        how = "reruns it; MAKE is train.py:make, a function that makes your model (`ampwise init` writes one)"
        commands[f"ampwise replay {quoted(saved[0])} MAKE"] = how
    if steps_of(run) and kept:
        folder = quoted(str(run.folder))
        if not verbose:
            commands[f"ampwise report {folder} -v"] = "layers, times, and what was fine"
        commands[f"ampwise report {folder} -o page.html --open"] = "the same with curves, as a page"
    longest = max(map(len, commands), default=0)
    lines = [f"{INDENT}{command:{longest}}{GAP}{paint(what, 'dim', colour)}" for command, what in commands.items()]
    return "\n".join([where, *lines])
