"""Text for the terminal: wrapped sentences, titled lists and tables that fit its width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from ampwise.finding import Finding
from ampwise.finding.terminal import paint, printable

__all__ = [
    "GAP",
    "INDENT",
    "NARROWEST",
    "bullets",
    "finding_paragraph",
    "more_line",
    "shorten_middle",
    "text_table",
    "wrap_text",
]

NARROWEST = 60  # a smaller width is a mistake in COLUMNS
SHORTEST_NAME = 16
GAP = "  "
INDENT = "  "


def shorten_middle(name: str, width: int) -> str:
    """Shorten a long name in the middle: its start names the block, its end the weight."""
    from rich.cells import cell_len, chop_cells, set_cell_size

    if cell_len(name) <= width:
        return name
    tail = "".join(reversed(chop_cells(name[::-1], (width - 1) // 2)[0]))
    return set_cell_size(name, width - 1 - cell_len(tail)).rstrip() + "…" + tail


def wrap_text(text: str, width: int, indent: str = "", hang: int = 4) -> str:
    """Wrap a sentence; a word longer than a line, such as a path, is not broken."""
    after = indent + " " * hang if indent else ""
    return textwrap.fill(
        printable(text),
        width,
        initial_indent=indent,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def finding_paragraph(
    finding: Finding, source: Sequence[str], details: Iterable[str], *, margin: int, colour: bool, mark: str = ""
) -> str:
    """Return a finding as a paragraph: message, place, source lines, details such as the evidence, and fix.

    margin: width of the line numbers. mark: painted text before the name.
    """

    def block(text: str, indent: int) -> str:
        # Indented after the first line, so that no line looks like the start of a finding.
        return f"\n{'':{indent}}".join(printable(line) for line in text.split("\n"))

    head = paint(f"{finding.severity}[{finding.rule.code}]", finding.severity, colour)
    where = f"{'':{margin}}{paint('-->', 'gutter', colour)} {printable(str(finding.place))}"
    lines = [
        f"{head} {mark}{paint(printable(finding.rule.name), 'bold', colour)}: {block(finding.message, 2)}",
        *([where] if finding.place.as_dict() else []),
        *source,
        *[f"{'':{margin}} {paint('=', 'gutter', colour)} {printable(detail)}" for detail in details],
        f"{paint('help', 'help', colour)}: {block(finding.fix, 6)}",
    ]
    return "\n".join(lines)


def bullets(title: str, lines: Sequence[str], style: str, *, colour: bool, width: int) -> str:
    """Return a painted title and the sentences below it, each after a dash; empty without sentences."""
    items = [wrap_text(f"- {line}", width, INDENT, hang=2) for line in lines]
    return "\n".join([paint(title, style, colour), *items]) if items else ""


def more_line(count: int) -> list[str]:
    """Return a line that counts the items that are not shown; none if all are."""
    return [f"{INDENT}… and {count:,} more"] if count > 0 else []


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, colour: bool, width: int, styles: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a table: a name as wide as fits, right-aligned numbers, and a text in the last column.

    styles: how to paint the last column of each row; an empty one leaves it as it is.
    """
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    available = width - len(INDENT) - sum(widths[1:]) - len(GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(available, SHORTEST_NAME))

    def line(row: Sequence[str], style: str = "") -> str:
        name = shorten_middle(row[0], widths[0])
        numbers = [" " * (space - cell_len(cell)) + cell for cell, space in zip(row[1:-1], widths[1:-1], strict=True)]
        last = paint(row[-1], style, colour) if style else row[-1]
        return GAP.join([name + " " * (widths[0] - cell_len(name)), *numbers, last]).rstrip()

    painted = [line(row, style) for row, style in zip(rows, styles or [""] * len(rows), strict=True)]
    return [f"{INDENT}{each}" for each in (paint(line(headings), "dim", colour), *painted)]
