"""Build HTML for notebooks: everything escaped, inline styles, no scripts, for light and dark themes.

A notebook has its own text and background colours: text uses the notebook's, and coloured areas are transparent tints.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from ampwise.finding import Finding
from ampwise.finding.terminal import printable

# One colour, one meaning, as on the pages: what a format makes of values, severities and "ok", the marked line.
COLOURS = {"lost": "#c2418b", "subnormal": "#dd9fc4", "normal": "#3f929c", "overflow": "#7564c8"}
TINTS = {"error": "#d9433a", "warning": "#cf8a0a", "info": "#7a8a9b", "ok": "#2f9a60"}
PLAIN, MARK = "#808080", "#4a8fe0"
FAINT = "22"  # opacity of a tint, as two hex digits
FONT = "font:13px sans-serif"
MONO = "font:12px monospace;unicode-bidi:isolate"


def text(words: object) -> str:
    """Return untrusted text escaped: no markup, and no characters that hide or reorder others.

    >>> text("<b>\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return html.escape(printable(str(words)))


def prose(words: str) -> str:
    """Return text as HTML: `names` in backquotes and indented lines become code."""
    lines = []
    for line in words.split("\n"):
        if line.startswith(" "):
            lines.append(f'<code style="{MONO};white-space:pre-wrap">{text(line)}</code>')
        else:
            lines.append(re.sub("`([^`]+)`", lambda name: f'<code style="{MONO}">{name[1]}</code>', text(line)))
    return "<br>".join(lines)


def code(words: object) -> str:
    """Return a name, path or line as code, isolated so that right-to-left letters reorder nothing around it."""
    return f'<code style="{MONO}">{text(words)}</code>'


def bold(words: object) -> str:
    return f"<b>{text(words)}</b>"


def badge(words: object, mood: str = "") -> str:
    """Return a word with a tinted background; ``mood`` is a severity, "ok", or empty."""
    tint = TINTS.get(mood, PLAIN)
    style = f"border:1px solid {tint};background:{tint}{FAINT};border-radius:4px;padding:0 5px;white-space:nowrap"
    return f'<span style="{style}">{text(words)}</span>'


def paragraph(markup: str, *, soft: bool = False) -> str:
    return f'<p style="{FONT};margin:4px 0{";opacity:.75" if soft else ""}">{markup}</p>' if markup else ""


def box(markup: str, mood: str = "") -> str:
    """Return a box with a coloured bar on its left; ``mood`` is a severity, "ok", or empty."""
    tint = TINTS.get(mood, PLAIN)
    return f'<div style="{FONT};margin:6px 0;padding:2px 10px;border-left:4px solid {tint}">{markup}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a table. Cells are markup, headings are text; the first ``left`` columns and the last are left-aligned."""
    shown = list(rows)
    columns = max((len(row) for row in shown), default=len(headings))
    aligned = ["left" if column < left or column == columns - 1 else "right" for column in range(columns)]
    head = "".join(_cell("th", text(cell), side) for cell, side in zip(headings, aligned, strict=False))
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, side) for cell, side in zip_longest(row, aligned, fillvalue="")) + "</tr>"
        for row in shown
    )
    top = f"<thead><tr>{head}</tr></thead>" if headings else ""
    return f'<table style="{FONT};border-collapse:collapse;margin:6px 0">{top}<tbody>{body}</tbody></table>'


def source(lines: Mapping[int, str], marked: int | None = None) -> str:
    """Return source lines with their numbers; the marked line is tinted."""
    if not lines:
        return ""
    width = len(str(max(lines)))
    rows = []
    for number, line in lines.items():
        style = f"display:block;background:{MARK}33" if number == marked else "display:block"
        gutter = f'<span style="opacity:.6">{number:{width}} </span>'
        rows.append(f'<span style="{style}">{gutter}{text(line.expandtabs(4))}</span>')
    style = f"{MONO};margin:4px 0;padding:4px 8px;background:{PLAIN}{FAINT};overflow-x:auto"
    return f'<pre style="{style}">{"".join(rows)}</pre>'


def facts_html(title: str, facts: Mapping[str, object], *, mood: str = "", note: str = "") -> str:
    """Return a title and a table with one row per fact."""
    head = paragraph(f"{bold(title)} {badge(note, mood) if note else ''}".rstrip())
    rows = [[text(name), code(value)] for name, value in facts.items()]
    return box(head + (table((), rows) if rows else ""), mood)


def headline(finding: Finding) -> str:
    """Return the severity, rule and message of a finding."""
    severity = str(finding.severity)
    return f"{badge(f'{severity} {finding.rule.code}', severity)} {bold(finding.rule.name)}: {prose(finding.message)}"


def finding_html(finding: Finding, *, lines: Mapping[int, str] | None = None, details: Iterable[str] = ()) -> str:
    """Return a finding as a card: message, place, source lines, details and fix."""
    place = finding.place
    return box(
        paragraph(headline(finding))
        + (paragraph(code(place)) if place.as_dict() else "")
        + source(lines or {}, place.line)
        + "".join(paragraph(text(one), soft=True) for one in details if one)
        + paragraph(f"<b>Fix:</b> {prose(finding.fix)}"),
        str(finding.severity),
    )


def _cell(tag: str, markup: str, side: str) -> str:
    # Alignment, padding and background are always set, since the notebook's style sheet sets some of them.
    return f'<{tag} style="text-align:{side};padding:2px 12px 2px 0;background:none">{markup}</{tag}>'
