"""Two runs beside each other in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampwise.printers.terminal import paint, printable
from ampwise.report.fitting import cropped, wrapped
from ampwise.report.wording import percent

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
STYLES = {"better": "ok", "worse": "warning"}  # of what a number is judged to be
TITLES = {
    "new": ("New", "warning"),
    "open": ("In one run, and nobody knows of the other", "warning"),
    "still": ("Still there", "bold"),
    "gone": ("Gone", "ok"),
}


def comparison_text(compared: Comparison, *, colour: bool, width: int) -> str:
    """The whole text, ending in a newline."""
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
    """A verdict on a line of its own; a folder's name, with which it may begin, keeps its small letter."""
    ours = verdict.startswith(("neither ", "the findings of "))
    return f"{verdict[0].upper()}{verdict[1:]}." if ours else f"{verdict}."


def how_often(one: ComparedFinding) -> str:
    """How often it happened in both runs: "at 100% of the steps before, at 2.5% now"; empty where nobody can tell."""
    old, new = one.rate_before, one.rate_after
    if one.before is None or one.after is None or old is None or new is None:
        return ""
    if one.before.count == one.after.count == 1:
        return ""  # it is said once a run, and no rate
    if max(old, new) > 1:
        return f"{old:.3g} times a step before, {new:.3g} now"
    told = percent(old), percent(new)
    return f"at {told[0]} of the steps before, at {told[1]} now" if len({*told}) > 1 else f"at {told[0]} of the steps"


def _opening(compared: Comparison, colour: bool, width: int) -> str:
    first = paint(wrapped(sentence(compared.verdict), width), compared.mood, colour)
    names = [f"before{GAP}{printable(compared.before)}", f"after{GAP} {printable(compared.after)}"]
    return "\n".join([first, *names, *[wrapped(f"- {note}", width, INDENT, 2) for note in compared.notes]])


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
    text = wrapped(f"{head} {finding.rule.name}: {finding.message}", width, INDENT, 2)
    yield text.replace(head, paint(head, finding.severity, colour), 1)
    told = [str(finding.place) if finding.place.as_dict() else "", how_often(one)]
    if any(told):
        yield wrapped(", ".join(part for part in told if part), width, INDENT * 2, 2)


def _setup(compared: Comparison, colour: bool, width: int) -> str:
    if not compared.setup:
        return ""
    lines = [
        wrapped(f"{one.what}: {one.before or 'not known'} → {one.after or 'not known'}", width, INDENT)
        for one in compared.setup
    ]
    return "\n".join([paint("What was different", "bold", colour), *lines])


def _numbers(compared: Comparison, colour: bool, width: int) -> str:
    rows = [
        (printable(one.name), one.written(one.before), one.written(one.after), one.change, STYLES.get(one.judged, ""))
        for one in compared.numbers
    ]
    about = [one.meaning for one in compared.numbers if one.key == "loss_at_end"][:1]
    said = [*(f"The loss at the end is the {meaning}." for meaning in about), compared.caution]
    notes = [wrapped(note, width, INDENT, 0) for note in said if note]
    return "\n".join([paint("Numbers", "bold", colour), *notes, *_columns(rows, colour, width)]) if rows else ""


def _layers(compared: Comparison, colour: bool, width: int) -> str:
    changed = [layer for layer in compared.layers if layer.changed]
    rows = [row for layer in changed[:MOST_LAYERS] for row in _layer_rows(layer)]
    more = [f"{INDENT}… and {len(changed) - MOST_LAYERS:,} more"] if len(changed) > MOST_LAYERS else []
    only = [
        wrapped(f"Only {which}: {_named(names)}.", width, INDENT)
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
        yield name, percent(layer.lost_before), percent(layer.lost_after), "lost in FP16", style
        name = ""
    yield name, f"{layer.norm_before:.3g}", f"{layer.norm_after:.3g}", "norm", ""


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _columns(rows: Sequence[tuple[str, str, str, str, str]], colour: bool, width: int) -> list[str]:
    """A name as wide as there is room, two numbers to the right, and words in the style that comes last."""
    from rich.cells import cell_len

    headed = [("", "before", "after", "", ""), *rows]
    widths = [max(cell_len(row[column]) for row in headed) for column in range(4)]
    room = width - len(INDENT) - sum(widths[1:]) - 3 * len(GAP)
    widths[0] = min(widths[0], max(room, SHORTEST_NAME))

    def line(row: tuple[str, str, str, str, str]) -> str:
        name = cropped(row[0], widths[0])
        numbers = [" " * (space - cell_len(cell)) + cell for cell, space in zip(row[1:3], widths[1:3], strict=True)]
        words = paint(row[3], row[4], colour) if row[4] else row[3]
        return INDENT + GAP.join([name + " " * (widths[0] - cell_len(name)), *numbers, words]).rstrip()

    return [paint(line(headed[0]), "dim", colour), *map(line, rows)]
