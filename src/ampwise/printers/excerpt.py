"""The lines of source around a place, with a caret under the spot."""

from __future__ import annotations

import unicodedata
from pathlib import Path

from ampwise.finding import Place
from ampwise.printers.terminal import paint, printable

__all__ = ["Sources", "excerpt", "gutter_width"]

CONTEXT = 2  # lines before and after
WIDEST = 160  # characters of a line that are shown; a line of data can be a megabyte
LEAD_IN = 40  # of those, how many before the spot when the line is cut
LARGEST_BYTES = 10_000_000  # a larger file is no script


class Sources:
    """The files findings point into, each read once."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def lines(self, file: str) -> list[str]:
        """The file's lines; none when it cannot be read as Python source."""
        if file not in self._lines:
            self._lines[file] = _read(file)
        return self._lines[file]


def excerpt(place: Place, sources: Sources, colour: bool = False) -> list[str]:
    """The lines to print for ``place``; none when it has no line or the file has none there (any more).

    A span over several lines is underlined on its first.
    """
    lines = sources.lines(place.file) if place.file is not None else []
    shown = _shown_lines(place, lines)
    if not shown:
        return []
    gutter = len(str(shown[-1]))
    blank = paint(f"{'':{gutter}} |", "gutter", colour)
    output = [blank]
    for number in shown:
        code, marks = _cut(lines[number - 1], place if number == place.line else None)
        output.append(f"{paint(f'{number:{gutter}} |', 'gutter', colour)} {code}".rstrip())
        if marks:
            output.append(f"{blank} {paint(marks, 'error', colour)}")
    return [*output, blank]


def gutter_width(place: Place, sources: Sources) -> int:
    """How wide the line numbers of the excerpt are, for what is to stand in line with it."""
    shown = _shown_lines(place, sources.lines(place.file) if place.file is not None else [])
    return len(str(shown[-1])) if shown else 1


def _shown_lines(place: Place, lines: list[str]) -> range:
    if place.line is None or place.line > len(lines):
        return range(0)
    return range(max(1, place.line - CONTEXT), min(len(lines), place.line + CONTEXT) + 1)


def _cut(line: str, place: Place | None) -> tuple[str, str]:
    """What is shown of a line, and the carets that go under it."""
    if place is None or place.column is None:
        return _shown(line[:WIDEST]) + ("..." if len(line) > WIDEST else ""), ""
    start = min(place.column - 1, len(line))
    stop = max(_stop(place, line), start + 1)
    first = max(0, start - LEAD_IN) if stop > WIDEST else 0
    last = first + WIDEST
    before = ("..." if first else "") + _shown(line[first:start])
    marked = _shown(line[start : min(stop, last)])
    rest = _shown(line[stop:last]) + ("..." if len(line) > last else "")
    return before + marked + rest, " " * _width(before) + "^" * max(1, _width(marked))


def _stop(place: Place, line: str) -> int:
    if place.end_line is None or place.end_column is None:
        return place.column or 1
    if place.end_line != place.line:
        return len(line.rstrip())
    return min(place.end_column - 1, len(line))


def _shown(text: str) -> str:
    return printable(text.replace("\t", "    "))


def _width(text: str) -> int:
    """Terminal columns: wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def _read(file: str) -> list[str]:
    import tokenize  # most runs find nothing, and then need not pay for it

    try:
        path = Path(file)
        # Not a pipe or a device, which might never end.
        if not path.is_file() or path.stat().st_size > LARGEST_BYTES:
            return []
        with tokenize.open(file) as script:  # honours the encoding a script declares
            lines = script.read().split("\n")
    except (OSError, SyntaxError, ValueError, LookupError):  # gone, or not Python source in any encoding
        return []
    return lines[:-1] if lines[-1] == "" else lines
