"""The lines of source around a place, with a caret under the spot."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from ampwise.finding import Place
from ampwise.printers.terminal import paint, printable

__all__ = ["Sources", "excerpt", "gutter_width", "start_of"]

CONTEXT = 2  # lines before and after
WIDEST = 160  # characters of a line that are shown; a line of data can be a megabyte
LEAD_IN = 40  # of those, how many before the spot when the line is cut
LARGEST_BYTES = 10_000_000  # a larger file is no script
LARGEST_NOTEBOOK_BYTES = 100_000_000  # a notebook holds the pictures it drew
NOTEBOOK = ".ipynb"


class Sources:
    """The files findings point into, each read once; ``texts`` has those that are not on disk, by name."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts = texts or {}
        self._lines: dict[str, dict[int | None, list[str]]] = {}

    def lines(self, file: str, cell: int | None = None) -> list[str]:
        """The lines of a file, or of a notebook's cell; none when it cannot be read as Python source."""
        if file not in self._lines:
            text = self._texts[file] if file in self._texts else _read(file)
            self._lines[file] = _cells(text) if file.endswith(NOTEBOOK) else {None: _split(text)}
        return self._lines[file].get(cell, [])

    def around(self, place: Place) -> list[str]:
        """The lines that the lines of ``place`` count in."""
        return [] if place.file is None else self.lines(place.file, place.cell)


def excerpt(place: Place, sources: Sources, colour: bool = False) -> list[str]:
    """The lines to print for ``place``; none when it has no line or the file has none there (any more).

    A span over several lines is underlined on its first.
    """
    lines = sources.around(place)
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
    shown = _shown_lines(place, sources.around(place))
    return len(str(shown[-1])) if shown else 1


def start_of(line: str) -> str:
    """What is shown of a line in which no spot is marked."""
    return _shown(line[:WIDEST]) + ("..." if len(line) > WIDEST else "")


def _shown_lines(place: Place, lines: list[str]) -> range:
    if place.line is None or place.line > len(lines):
        return range(0)
    return range(max(1, place.line - CONTEXT), min(len(lines), place.line + CONTEXT) + 1)


def _cut(line: str, place: Place | None) -> tuple[str, str]:
    """What is shown of a line, and the carets that go under it."""
    if place is None or place.column is None:
        return start_of(line), ""
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
    if text.isascii():
        return len(text)
    import unicodedata  # a library of its own, which few runs need

    # Mn and Me: marks on the character before, also those that do not combine, such as a variation selector.
    shown = (char for char in text if unicodedata.category(char) not in ("Mn", "Me"))
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in shown)


def _read(file: str) -> str:
    import tokenize  # most runs find nothing, and then need not pay for it

    largest = LARGEST_NOTEBOOK_BYTES if file.endswith(NOTEBOOK) else LARGEST_BYTES
    try:
        status = os.stat(file)  # noqa: PTH116 (pathlib takes longer to load than all the rest here)
        # Not a pipe or a device, which might never end.
        if not stat.S_ISREG(status.st_mode) or status.st_size > largest:
            return ""
        if file.endswith(NOTEBOOK):
            with open(file, encoding="utf-8-sig") as notebook:  # noqa: PTH123
                return notebook.read()
        with tokenize.open(file) as script:  # honours the encoding a script declares
            return script.read()
    except (OSError, SyntaxError, ValueError, LookupError):  # gone, or not Python source in any encoding
        return ""


def _split(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _cells(text: str) -> dict[int | None, list[str]]:
    """The lines of each cell of a notebook, by number; of none, if it is broken."""
    import json

    try:
        sources = [cell["source"] for cell in json.loads(text)["cells"]]
        codes = [source if isinstance(source, str) else "".join(source) for source in sources]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {number: _split(code) for number, code in enumerate(codes, 1)}
