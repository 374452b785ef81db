"""Small pieces of HTML for notebooks: everything escaped, styles inline, no script, at home in the light and the dark.

A notebook brings its own colours of text and ground, so that here the text has the notebook's, and whatever is coloured
is a tint that lets the ground through.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from ampwise.census.picture import COLOURS
from ampwise.finding import Finding
from ampwise.printers.terminal import printable

__all__ = [
    "badge",
    "bold",
    "box",
    "code",
    "facts_html",
    "finding_html",
    "headline",
    "paragraph",
    "prose",
    "source",
    "table",
    "text",
]

# Of severities and other moods; the same as in the pictures of censuses.
TINTS = {
    "error": COLOURS["lost"],
    "warning": COLOURS["subnormal"],
    "info": COLOURS["normal"],
    "ok": "#3c9a5f",
}
PLAIN = "#808080"
FAINT = "22"  # of 255: how much of a tint covers the ground
FONT = "font:13px sans-serif"
MONO = "font:12px monospace;unicode-bidi:isolate"


def text(words: object) -> str:
    """Text from anywhere: nothing in it is markup, and nothing hides or reorders characters.

    >>> text("<b>\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return html.escape(printable(str(words)))


def prose(words: str) -> str:
    """Sentences in which `names` stand between backquotes; what is indented below them is code."""
    return "<br>".join(_line(line) for line in words.split("\n"))


def code(words: object) -> str:
    """A name, a path, a line: on its own, so that letters of another direction move nothing around it."""
    return f'<code style="{MONO}">{text(words)}</code>'


def bold(words: object) -> str:
    return f"<b>{text(words)}</b>"


def badge(words: object, mood: str = "") -> str:
    """A word on a tint of its mood: a severity, "ok", or none."""
    tint = TINTS.get(mood, PLAIN)
    style = f"border:1px solid {tint};background:{tint}{FAINT};border-radius:4px;padding:0 5px;white-space:nowrap"
    return f'<span style="{style}">{text(words)}</span>'


def paragraph(markup: str, *, soft: bool = False) -> str:
    return f'<p style="{FONT};margin:4px 0{";opacity:.75" if soft else ""}">{markup}</p>' if markup else ""


def box(markup: str, mood: str = "") -> str:
    """What belongs together, with a bar of its mood at the side."""
    tint = TINTS.get(mood, PLAIN)
    return f'<div style="{FONT};margin:6px 0;padding:2px 10px;border-left:4px solid {tint}">{markup}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Cells are markup already, headings are text; the first ``left`` columns and the last to the left."""
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
    """Lines of source with their numbers; the one that is meant on a tint."""
    if not lines:
        return ""
    width = len(str(max(lines)))
    rows = []
    for number, line in lines.items():
        style = f"display:block;background:{TINTS['warning']}44" if number == marked else "display:block"
        gutter = f'<span style="opacity:.6">{number:{width}} </span>'
        rows.append(f'<span style="{style}">{gutter}{text(line.expandtabs(4))}</span>')
    style = f"{MONO};margin:4px 0;padding:4px 8px;background:{PLAIN}{FAINT};overflow-x:auto"
    return f'<pre style="{style}">{"".join(rows)}</pre>'


def facts_html(title: str, facts: Mapping[str, object], *, mood: str = "", note: str = "") -> str:
    """A title and what is known, a row each."""
    head = paragraph(f"{bold(title)} {badge(note, mood) if note else ''}".rstrip())
    rows = [[text(name), code(value)] for name, value in facts.items()]
    return box(head + (table((), rows) if rows else ""), mood)


def headline(finding: Finding) -> str:
    """How bad, which rule, and what."""
    severity = str(finding.severity)
    return f"{badge(f'{severity} {finding.rule.code}', severity)} {bold(finding.rule.name)}: {prose(finding.message)}"


def finding_html(finding: Finding, *, lines: Mapping[int, str] | None = None, told: Iterable[str] = ()) -> str:
    """A finding as a card: what, where, the lines around it, what is known of it, the fix."""
    place = finding.place
    return box(
        paragraph(headline(finding))
        + (paragraph(code(place)) if place.as_dict() else "")
        + source(lines or {}, place.line)
        + "".join(paragraph(text(one), soft=True) for one in told if one)
        + paragraph(f"<b>Fix:</b> {prose(finding.fix)}"),
        str(finding.severity),
    )


def _line(line: str) -> str:
    if line.startswith(" "):
        return f'<code style="{MONO};white-space:pre-wrap">{text(line)}</code>'
    return re.sub("`([^`]+)`", lambda name: f'<code style="{MONO}">{name[1]}</code>', text(line))


def _cell(tag: str, markup: str, side: str) -> str:
    # Every side is said, since a notebook's own style sets some of them.
    return f'<{tag} style="text-align:{side};padding:2px 12px 2px 0;background:none">{markup}</{tag}>'
