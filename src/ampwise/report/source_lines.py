"""The source lines around a finding, from the record: the script may have changed since it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Place
from ampwise.report.printers.excerpt import CONTEXT, SourceFiles, excerpt

if TYPE_CHECKING:
    from ampwise.runs.rows import CountedFinding

__all__ = ["excerpt_lines", "line_number_width", "recorded_lines"]

LAST_LINE = 1_000_000  # a record with a higher line number is damaged


def recorded_lines(counted: CountedFinding, context: int = CONTEXT) -> dict[int, str]:
    """Return the lines around the finding, by number; none if the record has no lines for its place."""
    first, lines = counted.excerpt.get("first_line"), counted.excerpt.get("lines")
    line = counted.finding.place.line
    if line is None or not isinstance(first, int) or not isinstance(lines, list) or not 1 <= first <= LAST_LINE:
        return {}
    numbered = dict(enumerate(map(str, lines), first))
    near = {number: text for number, text in numbered.items() if abs(number - line) <= context}
    return near if line in near else {}


def excerpt_lines(counted: CountedFinding, colour: bool) -> list[str]:
    """Return the lines with their numbers, and carets under the marked span, as the linter shows them."""
    lines = recorded_lines(counted)
    if not lines:
        return []
    first = min(lines)
    place = _marked(counted.finding.place, lines)
    drawn = excerpt(place, _RecordedLines([*[""] * (first - 1), *lines.values()]), colour)
    not_kept = first - max(1, (place.line or 1) - CONTEXT)
    return [*drawn[:1], *drawn[1 + not_kept :]]


def line_number_width(counted: CountedFinding) -> int:
    """Return the width of the line numbers."""
    return len(str(max(recorded_lines(counted), default=1)))


class _RecordedLines(SourceFiles):
    """Source lines that need not be read from a file."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._kept = lines

    def around(self, place: Place) -> list[str]:
        return self._kept


def _marked(place: Place, lines: dict[int, str]) -> Place:
    """Return the span to mark: the whole line if the place has no column, as for calls recorded at run time."""
    line = place.line or 1
    text = lines[line]
    if place.column is not None or not text.strip():
        return place
    start, stop = len(text) - len(text.lstrip()) + 1, len(text.rstrip()) + 1
    return Place(file=place.file, line=line, column=start, end_line=line, end_column=stop, cell=place.cell)
