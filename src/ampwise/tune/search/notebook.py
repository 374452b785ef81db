"""What was found, as a notebook shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.printers.html import badge, bold, box, code, paragraph, table, text
from ampwise.tune.search.text import MOST_ROWS, format_rows, gains, headline, how, shown_name, told_alone

if TYPE_CHECKING:
    from ampwise.tune.search.found import Found, Sensitive

__all__ = ["found_html"]


def found_html(found: Found) -> str:
    """The answer, the formats, the sensitive modules with reasons, the gain."""
    mood = "ok" if found.narrower else "warning"
    head = box(paragraph(f"{badge('search', mood)} {bold(headline(found))}"), mood)
    formats = table(
        ("format", "modules", "products", "which"),
        [
            [code(fmt), text(count), text(share), code(which) if which else ""]
            for fmt, count, share, which in format_rows(found)
        ],
    )
    raised = [each for each in found.ranking if each.narrower is not None]
    headings = ("most sensitive", "class", "has", "not", "error alone", "why")
    sensitive = table(headings, map(_row, raised[:MOST_ROWS]), left=4) if raised else ""
    told = "".join(paragraph(text(sentence)) for sentence in gains(found))
    return head + formats + sensitive + told + "".join(paragraph(text(one), soft=True) for one in how(found))


def _row(each: Sensitive) -> list[str]:
    why = "<br>".join(map(text, each.reasons))
    names = [code(shown_name(each.name)), text(each.kind), text(each.format), text(each.narrower or "")]
    return [*names, text(told_alone(each)), why]
