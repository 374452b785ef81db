"""A comparison of two runs as terminal text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampwise.finding.terminal import paint, printable
from ampwise.report.formatting import format_percent
from ampwise.report.text_layout import shorten_middle, wrap_text

if TYPE_CHECKING:
    from ampwise.report.comparison.comparison import Comparison
    from ampwise.report.comparison.findings import ComparedFinding
    from ampwise.report.comparison.layers import ComparedLayer

__all__ = ["STYLES", "TITLES", "comparison_text", "how_often", "sentence"]

MOST_FINDINGS = 20  # of each kind; JSON and the page have all
MOST_LAYERS = 10
MOST_NAMES = 4
NARROWEST = 60
SHORTEST_NAME = 16
GAP = "  "
INDENT = "  "
STYLES = {"better": "ok", "worse": "warning"}  # by verdict on a number
TITLES = {
    "new": ("New", "warning"),
    "open": ("In one run, unknown for the other", "warning"),
    "still": ("Still there", "bold"),
    "gone": ("Gone", "ok"),
}


def comparison_text(compared: Comparison, *, colour: bool, width: int) -> str:
    """Return the whole text, ending in a newline."""
    width = max(width, NARROWEST)
    parts = [
        _opening(compared, colour, width),
        *[_findings(compared, status, colour, width) for status in TITLES],
        _setup(compared, colour, width),
        _numbers(compared, colour, width),
        _layers(compared, colour, width),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def sentence(verdict: str) -> str:
    """Return a verdict as a sentence; if it begins with a folder's name, that keeps its case."""
    ours = verdict.startswith(("neither ", "the findings of "))
    return f"{verdict[0].upper()}{verdict[1:]}." if ours else f"{verdict}."


def how_often(one: ComparedFinding) -> str:
    """Describe how often it occurred in both runs: "at 100% of the steps before, at 2.5% now"; empty if unknown."""
    old, new = one.rate_before, one.rate_after
    if one.before is None or one.after is None or old is None or new is None:
        return ""
    if one.before.count == one.after.count == 1:
        return ""  # reported once per run: a rate would mean nothing
    if max(old, new) > 1:
        return f"{old:.3g} times per step before, {new:.3g} now"
    rates = format_percent(old), format_percent(new)
    same = rates[0] == rates[1]
    return f"at {rates[0]} of the steps" if same else f"at {rates[0]} of the steps before, at {rates[1]} now"


def _opening(compared: Comparison, colour: bool, width: int) -> str:
    first = paint(wrap_text(sentence(compared.verdict), width), compared.mood, colour)
    names = [f"before{GAP}{printable(compared.before)}", f"after{GAP} {printable(compared.after)}"]
    return "\n".join([first, *names, *[wrap_text(f"- {note}", width, INDENT, 2) for note in compared.notes]])


def _findings(compared: Comparison, status: str, colour: bool, width: int) -> str:
    found = [one for one in compared.findings if one.status == status]
    if not found:
        return ""
    title, style = TITLES[status]
    lines = [line for one in found[:MOST_FINDINGS] for line in _finding(one, colour, width)]
    more = len(found) - MOST_FINDINGS
    return "\n".join(
        [
            paint(f"{title} ({len(found):,})", style, colour),
            *lines,
            *([f"{INDENT}… and {more:,} more"] if more > 0 else []),
        ]
    )


def _finding(one: ComparedFinding, colour: bool, width: int) -> Iterator[str]:
    finding = one.seen.finding
    head = f"{finding.severity}[{finding.rule.code}]"
    text = wrap_text(f"{head} {finding.rule.name}: {finding.message}", width, INDENT, 2)
    yield text.replace(head, paint(head, finding.severity, colour), 1)
    details = [str(finding.place) if finding.place.as_dict() else "", how_often(one)]
    if any(details):
        yield wrap_text(", ".join(part for part in details if part), width, INDENT * 2, 2)


def _setup(compared: Comparison, colour: bool, width: int) -> str:
    if not compared.setup:
        return ""
    lines = [
        wrap_text(f"{one.what}: {one.before or 'unknown'} → {one.after or 'unknown'}", width, INDENT)
        for one in compared.setup
    ]
    return "\n".join([paint("Differences in setup", "bold", colour), *lines])


def _numbers(compared: Comparison, colour: bool, width: int) -> str:
    rows = [
        (printable(one.name), one.written(one.before), one.written(one.after), one.change, STYLES.get(one.judged, ""))
        for one in compared.numbers
    ]
    about = [one.meaning for one in compared.numbers if one.key == "loss_at_end"][:1]
    sentences = [*(f"The loss at the end is the {meaning}." for meaning in about), compared.caution]
    notes = [wrap_text(note, width, INDENT, 0) for note in sentences if note]
    return "\n".join([paint("Numbers", "bold", colour), *notes, *_columns(rows, colour, width)]) if rows else ""


def _layers(compared: Comparison, colour: bool, width: int) -> str:
    changed = [layer for layer in compared.layers if layer.changed]
    rows = [row for layer in changed[:MOST_LAYERS] for row in _layer_rows(layer)]
    more = [f"{INDENT}… and {len(changed) - MOST_LAYERS:,} more"] if len(changed) > MOST_LAYERS else []
    only = [
        wrap_text(f"Only {which}: {_named(names)}.", width, INDENT)
        for which, names in (("before", compared.only_before), ("after", compared.only_after))
        if names
    ]
    if not rows and not only:
        return ""
    title, table = ("Layers that changed the most", _columns(rows, colour, width)) if rows else ("Layers", [])
    return "\n".join([paint(title, "bold", colour), *table, *more, *only])


def _layer_rows(layer: ComparedLayer) -> Iterator[tuple[str, str, str, str, str]]:
    name = printable(layer.name)
    if layer.lost_before is not None and layer.lost_after is not None and layer.more_lost:
        style = STYLES["worse" if layer.more_lost > 0 else "better"]
        yield name, format_percent(layer.lost_before), format_percent(layer.lost_after), "lost in FP16", style
        name = ""
    yield name, f"{layer.norm_before:.3g}", f"{layer.norm_after:.3g}", "norm", ""


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _columns(rows: Sequence[tuple[str, str, str, str, str]], colour: bool, width: int) -> list[str]:
    """Return table lines: a name as wide as fits, two right-aligned numbers, and text in the style given last."""
    from rich.cells import cell_len

    headed = [("", "before", "after", "", ""), *rows]
    widths = [max(cell_len(row[column]) for row in headed) for column in range(4)]
    available = width - len(INDENT) - sum(widths[1:]) - 3 * len(GAP)
    widths[0] = min(widths[0], max(available, SHORTEST_NAME))

    def line(row: tuple[str, str, str, str, str]) -> str:
        name = shorten_middle(row[0], widths[0])
        numbers = [" " * (space - cell_len(cell)) + cell for cell, space in zip(row[1:3], widths[1:3], strict=True)]
        words = paint(row[3], row[4], colour) if row[4] else row[3]
        return INDENT + GAP.join([name + " " * (widths[0] - cell_len(name)), *numbers, words]).rstrip()

    return [paint(line(headed[0]), "dim", colour), *map(line, rows)]
