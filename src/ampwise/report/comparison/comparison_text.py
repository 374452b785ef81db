"""A comparison of two runs as terminal text."""

from __future__ import annotations

from ampwise.finding.terminal import paint, printable
from ampwise.report.comparison.comparison import Comparison
from ampwise.report.comparison.matches import ComparedFinding
from ampwise.report.formatting import format_percent
from ampwise.report.text_layout import GAP, INDENT, NARROWEST, more_line, place_text, text_table, wrap_text

MOST_FINDINGS = 20  # of each kind; JSON and the page have all
MOST_LAYERS = 10
MOST_NAMES = 4
HEADINGS = ("", "before", "after", "")
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
    first = paint(wrap_text(sentence(compared.verdict), width), compared.mood, colour)
    names = [f"before{GAP}{printable(compared.before)}", f"after{GAP} {printable(compared.after)}"]
    notes = [wrap_text(f"- {note}", width, INDENT, 2) for note in compared.notes]
    setup = [
        wrap_text(f"{one.what}: {one.before or 'unknown'} → {one.after or 'unknown'}", width, INDENT)
        for one in compared.setup
    ]
    parts = [
        "\n".join([first, *names, *notes]),
        *[_findings(compared, status, colour, width) for status in TITLES],
        "\n".join([paint("Differences in setup", "bold", colour), *setup]) if setup else "",
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


def _findings(compared: Comparison, status: str, colour: bool, width: int) -> str:
    found = [one for one in compared.findings if one.status == status]
    if not found:
        return ""
    title, style = TITLES[status]
    lines = []
    for one in found[:MOST_FINDINGS]:
        finding = one.seen.finding
        head = f"{finding.severity.word}[{finding.rule.code}]"
        text = wrap_text(f"{head} {finding.rule.name}: {finding.message}", width, INDENT, 2)
        lines.append(text.replace(head, paint(head, finding.severity, colour), 1))
        details = [place_text(finding.place), how_often(one)]
        if any(details):
            lines.append(wrap_text(", ".join(part for part in details if part), width, INDENT * 2, 2))
    heading = paint(f"{title} ({len(found):,})", style, colour)
    return "\n".join([heading, *lines, *more_line(len(found) - MOST_FINDINGS)])


def _numbers(compared: Comparison, colour: bool, width: int) -> str:
    if not compared.numbers:
        return ""
    rows = [
        [printable(one.name), one.written(one.before), one.written(one.after), one.change] for one in compared.numbers
    ]
    styles = [STYLES.get(one.judged, "") for one in compared.numbers]
    table = text_table(HEADINGS, rows, colour=colour, width=width, styles=styles)
    about = [one.meaning for one in compared.numbers if one.key == "loss_at_end"][:1]
    sentences = [*(f"The loss at the end is the {meaning}." for meaning in about), compared.caution]
    notes = [wrap_text(note, width, INDENT, 0) for note in sentences if note]
    return "\n".join([paint("Numbers", "bold", colour), *notes, *table])


def _layers(compared: Comparison, colour: bool, width: int) -> str:
    changed = [layer for layer in compared.layers if layer.changed]
    lines = []
    if changed:
        rows, styles = [], []
        for layer in changed[:MOST_LAYERS]:
            name = printable(layer.name)
            if layer.lost_before is not None and layer.lost_after is not None and layer.more_lost:
                rows.append([name, format_percent(layer.lost_before), format_percent(layer.lost_after), "lost in FP16"])
                styles.append(STYLES["worse" if layer.more_lost > 0 else "better"])
                name = ""
            rows.append([name, f"{layer.norm_before:.3g}", f"{layer.norm_after:.3g}", "norm"])
            styles.append("")
        lines = text_table(HEADINGS, rows, colour=colour, width=width, styles=styles)
        lines += more_line(len(changed) - MOST_LAYERS)
    for which, names in (("before", compared.only_before), ("after", compared.only_after)):
        if names:
            more = len(names) - MOST_NAMES
            named = ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
            lines.append(wrap_text(f"Only {which}: {named}.", width, INDENT))
    title = "Layers that changed the most" if changed else "Layers"
    return "\n".join([paint(title, "bold", colour), *lines]) if lines else ""
