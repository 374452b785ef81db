"""How results are shown: they are lines, tables and findings, which a terminal, print() and notebooks render."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.finding import Finding, html
from ampwise.finding.terminal import console, print_tables, printable, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BADGES = {"green": "ok", "yellow": "info"}  # moods of rows in a notebook, by their style on a terminal


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence, in a style of rich; an empty one is a gap between others."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict. ``badge`` and ``mood`` are for notebooks: a word before it, and a severity or "ok"."""

    text: str
    badge: str = ""
    mood: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """A table, a cell for each heading; the columns in ``left`` are text, the others are numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)
    names: Collection[int] = ()  # columns of names, which notebooks show as code
    wraps: Collection[int] = ()  # columns that may take several lines
    styles: Sequence[str] = ()  # of the rows
    more: int = 0  # rows that are left out


Part = Line | Headline | ResultTable | Finding


class ShownResult:
    """Base of results: ``_parts`` yields what print() and notebooks show."""

    __slots__ = ()

    def _parts(self) -> Iterator[Part]:
        """Yield what is shown, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        out = console(io.StringIO())
        with out.capture() as captured:
            _show(out, self._parts())
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def _repr_html_(self) -> str:
        return "".join(map(_html, self._parts()))


def print_result(result: ShownResult) -> None:
    """Print a result on stdout."""
    print_parts(result._parts())


def print_parts(parts: Iterable[Part]) -> None:
    """Print on stdout."""
    print_tables(lambda out: _show(out, parts))


def _show(out: Console, parts: Iterable[Part]) -> None:
    """Print parts, with an empty line before and after each table and each finding."""

    def put(text: str, style: str = "") -> None:  # without wrapping it, so that it can be searched for
        out.print(printable(text), style=style, soft_wrap=True)

    before: Part | None = None
    for part in parts:
        if before is not None and (
            isinstance(part, ResultTable | Finding) or isinstance(before, ResultTable | Finding)
        ):
            out.print()
        if isinstance(part, ResultTable):
            out.print(_rich_table(part))
        elif isinstance(part, Finding):
            put(f"{part.rule.code} {part.rule.name}: {part.message}")
            put(f"  fix: {part.fix}")
            if "experiment" in part.evidence:
                put(f"  try: {part.evidence['experiment']}")
        else:
            put(part.text, "bold" if isinstance(part, Headline) else part.style)
        before = part


def _rich_table(part: ResultTable) -> Table:
    from rich.text import Text  # a name is not markup

    shown = table()
    shown.show_header = any(part.headings)
    for column, heading in enumerate(part.headings):
        justify = "left" if column in part.left else "right"
        shown.add_column(heading, justify=justify, no_wrap=column not in part.wraps)  # type: ignore[arg-type]
    for number, cells in enumerate(part.rows):
        style = part.styles[number] if part.styles else ""
        shown.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    if part.more > 0:
        shown.add_row(f"… and {part.more:,} more")
    return shown


def _html(part: Part) -> str:
    if isinstance(part, Finding):
        return html.finding_html(part)
    if isinstance(part, Line):
        return html.paragraph(html.text(part.text), soft=part.style == "dim")
    if isinstance(part, Headline):
        badge = f"{html.badge(part.badge, part.mood)} " if part.badge else ""
        return html.box(html.paragraph(f"{badge}{html.bold(part.text)}"), part.mood)
    rows = []
    for number, cells in enumerate(part.rows):
        style = part.styles[number] if part.styles else ""
        shown = [
            html.code(cell) if column in part.names and cell else html.text(cell) for column, cell in enumerate(cells)
        ]
        if style in BADGES:
            shown[-1] = html.badge(cells[-1], BADGES[style])
        elif style == "bold":
            shown[0] = html.bold(cells[0])
        rows.append(shown)
    rest = html.paragraph(f"… and {part.more:,} more") if part.more > 0 else ""
    left = next((column for column in range(len(part.headings)) if column not in part.left), len(part.headings))
    return html.table(part.headings if any(part.headings) else (), rows, left=left) + rest
