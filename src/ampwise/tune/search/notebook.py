"""Show the result of a search in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding.html import badge, bold, box, code, paragraph, table, text
from ampwise.tune.search.text import (
    MOST_ROWS,
    alone_text,
    format_rows,
    gain_sentences,
    headline,
    method_sentences,
    shown_name,
)

if TYPE_CHECKING:
    from ampwise.tune.search.result import ModuleSensitivity, SearchResult

__all__ = ["found_html"]


def found_html(found: SearchResult) -> str:
    """Render the verdict, the formats, the sensitive modules with reasons, and the gain."""
    mood = "ok" if found.narrower else "warning"
    head = box(paragraph(f"{badge('search', mood)} {bold(headline(found))}"), mood)
    formats = table(
        ("format", "modules", "matmuls", "which"),
        [
            [code(fmt), text(count), text(share), code(which) if which else ""]
            for fmt, count, share, which in format_rows(found)
        ],
    )
    raised = [each for each in found.ranking if each.narrower is not None]
    headings = ("most sensitive", "class", "has", "not", "error alone", "why")
    sensitive = table(headings, map(_row, raised[:MOST_ROWS]), left=4) if raised else ""
    sentences = "".join(paragraph(text(sentence)) for sentence in gain_sentences(found))
    return (
        head
        + formats
        + sensitive
        + sentences
        + "".join(paragraph(text(one), soft=True) for one in method_sentences(found))
    )


def _row(each: ModuleSensitivity) -> list[str]:
    why = "<br>".join(map(text, each.reasons))
    names = [code(shown_name(each.name)), text(each.kind), text(each.format), text(each.narrower or "")]
    return [*names, text(alone_text(each)), why]
