"""The lines of source that a record keeps around a finding: the script may have changed since it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Place
from ampwise.printers.excerpt import CONTEXT, Sources, excerpt

if TYPE_CHECKING:
    from ampwise.record.rows import Seen

__all__ = ["drawn_lines", "gutter_of", "kept_lines"]

LAST_LINE = 1_000_000  # a record that claims a later one is broken


def kept_lines(seen: Seen, context: int = CONTEXT) -> dict[int, str]:
    """The lines around the finding, by number; none where the record has none that fit its place."""
    first, lines = seen.excerpt.get("first_line"), seen.excerpt.get("lines")
    line = seen.finding.place.line
    if line is None or not isinstance(first, int) or not isinstance(lines, list) or not 1 <= first <= LAST_LINE:
        return {}
    numbered = dict(enumerate(map(str, lines), first))
    near = {number: text for number, text in numbered.items() if abs(number - line) <= context}
    return near if line in near else {}


def drawn_lines(seen: Seen, colour: bool) -> list[str]:
    """The lines with their numbers and carets under the one that is meant, as the linter shows them."""
    lines = kept_lines(seen)
    if not lines:
        return []
    first = min(lines)
    place = _marked(seen.finding.place, lines)
    drawn = excerpt(place, _Kept([*[""] * (first - 1), *lines.values()]), colour)
    not_kept = first - max(1, (place.line or 1) - CONTEXT)
    return [*drawn[:1], *drawn[1 + not_kept :]]


def gutter_of(seen: Seen) -> int:
    """How wide the line numbers are."""
    return len(str(max(kept_lines(seen), default=1)))


class _Kept(Sources):
    """Lines that are at hand."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._kept = lines

    def around(self, place: Place) -> list[str]:
        return self._kept


def _marked(place: Place, lines: dict[int, str]) -> Place:
    """A call seen at run time has a line and no column: all of the line is meant."""
    line = place.line or 1
    text = lines[line]
    if place.column is not None or not text.strip():
        return place
    start, stop = len(text) - len(text.lstrip()) + 1, len(text.rstrip()) + 1
    return Place(file=place.file, line=line, column=start, end_line=line, end_column=stop, cell=place.cell)
