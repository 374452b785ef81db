"""Text for the terminal: wrapped sentences, titled lists and tables that fit its width."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterable, Sequence

from ampwise.finding import Finding, Place
from ampwise.finding.terminal import paint, printable

NARROWEST = 60  # a smaller width is a mistake in COLUMNS
SHORTEST_NAME = 16
GAP = "  "
INDENT = "  "


def path_from_here(file: str) -> str:
    """Return a path relative to the current directory if it is inside it, else unchanged."""
    try:
        here = os.path.join(os.getcwd(), "")  # noqa: PTH109, PTH118 (a record's path need not be one of this system)
    except OSError:  # the directory was removed
        return file
    return file.removeprefix(here) or file


def place_text(place: Place) -> str:
    """Return a place of a run without steps and ranks, which are said elsewhere; carets show the column."""
    file = None if place.file is None else path_from_here(place.file)
    shown = place.but(file=file, column=None, end_line=None, end_column=None, step=None, rank=None)
    return str(shown) if shown.as_dict() else ""


def shorten_middle(name: str, width: int) -> str:
    """Shorten a long name in the middle: its start names the block, its end the weight."""
    from rich.cells import cell_len, chop_cells, set_cell_size

    if cell_len(name) <= width:
        return name
    tail = "".join(reversed(chop_cells(name[::-1], (width - 1) // 2)[0]))
    return set_cell_size(name, width - 1 - cell_len(tail)).rstrip() + "…" + tail


def wrap_text(text: str, width: int, indent: str = "", hang: int | str = 4) -> str:
    """Wrap a sentence; a word longer than a line, such as a path, is not broken.

    hang: the indentation of the following lines, as text, or in columns more than ``indent``.
    """
    after = hang if isinstance(hang, str) else indent + " " * hang if indent else ""
    return textwrap.fill(
        printable(text),
        width,
        initial_indent=indent,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def finding_paragraph(
    finding: Finding,
    *,
    where: str,
    source: Sequence[str],
    details: Iterable[str] = (),
    colour: bool,
    width: int | None = None,
    mark: str = "",
) -> str:
    """Return a finding as a paragraph: message, place, source line, details such as the evidence, and fix.

    source: prepared lines. mark: painted text before the rule's name. width: None leaves lines as long as they are.
    """

    def block(text: str, indent: str, hang: str) -> str:
        # Indented after the first line, so that no line looks like the start of a finding.
        lines: list[str] = []
        for line in text.split("\n"):
            start = hang if lines else indent
            is_code = bool(lines) and line.startswith(INDENT * 2)  # never wrapped: it is to be copied
            if width is None or is_code:
                lines.append(f"{start}{printable(line)}")
            else:
                lines.append(wrap_text(line, width, start, hang=hang))
        return "\n".join(lines)

    head = f"{finding.severity.word}[{finding.rule.code}]"
    first = block(f"{head} {finding.rule.name}: {finding.message}", "", INDENT)
    fix = block(f"help: {finding.fix}", INDENT, INDENT * 4)
    lines = [
        first.replace(head, f"{paint(head, finding.severity, colour)}{f' {mark}'.rstrip()}", 1),
        *([f"{INDENT}{paint('-->', 'gutter', colour)} {printable(where)}"] if where else []),
        *source,
        *[block(f"= {printable(detail)}", INDENT, INDENT * 2) for detail in details],
        fix.replace("help", paint("help", "help", colour), 1),
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
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    colour: bool,
    width: int,
    styles: Sequence[str] = (),
    left: Collection[int] | None = None,
) -> list[str]:
    """Return the lines of a table: a name as wide as fits, right-aligned numbers, and a text in the last column.

    styles: how to paint the last column of each row; an empty one leaves it as it is. left: other columns of text.
    """
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    available = width - len(INDENT) - sum(widths[1:]) - len(GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(available, SHORTEST_NAME))

    texts = (0, len(widths) - 1) if left is None else left

    def line(row: Sequence[str], style: str = "") -> str:
        cells = [shorten_middle(row[0], widths[0]), *row[1:]]
        fills = [" " * (space - cell_len(cell)) for cell, space in zip(cells, widths, strict=True)]
        cells[-1] = paint(cells[-1], style, colour) if style else cells[-1]
        for place, fill in enumerate(fills):
            cells[place] = cells[place] + fill if place in texts else fill + cells[place]
        return GAP.join(cells).rstrip()

    painted = [line(row, style) for row, style in zip(rows, styles or [""] * len(rows), strict=True)]
    return [f"{INDENT}{each}" for each in (paint(line(headings), "dim", colour), *painted)]
