"""Show the source lines around a place, with carets under the span."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from ampwise.finding import Place
from ampwise.finding.terminal import paint, printable

__all__ = ["SourceFiles", "excerpt", "gutter_width", "line_start"]

CONTEXT = 2  # lines before and after
MAX_LINE_WIDTH = 160  # characters of a line to show; a line of data can be a megabyte
LEAD_IN = 40  # characters to show before the span when the line is cut
LARGEST_BYTES = 10_000_000  # a larger file is not a script
LARGEST_NOTEBOOK_BYTES = 100_000_000  # a notebook contains its images
NOTEBOOK = ".ipynb"


class SourceFiles:
    """The files that findings refer to, each read once; ``texts`` has those that are not on disk, by name."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts = texts or {}
        self._lines: dict[str, dict[int | None, list[str]]] = {}

    def lines(self, file: str, cell: int | None = None) -> list[str]:
        """Return the lines of a file, or of a notebook's cell; none if it cannot be read as Python source."""
        if file not in self._lines:
            text = self._texts[file] if file in self._texts else _read(file)
            self._lines[file] = _cells(text) if file.endswith(NOTEBOOK) else {None: _split(text)}
        return self._lines[file].get(cell, [])

    def around(self, place: Place) -> list[str]:
        """Return all lines of the file or cell that ``place`` is in."""
        return [] if place.file is None else self.lines(place.file, place.cell)


def excerpt(place: Place, sources: SourceFiles, colour: bool = False) -> list[str]:
    """Return the lines to print for ``place``; none if it has no line, or the file no longer has that line.

    A span of several lines is underlined on its first line.
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


def gutter_width(place: Place, sources: SourceFiles) -> int:
    """Return the width of the excerpt's line numbers, to align other lines with it."""
    shown = _shown_lines(place, sources.around(place))
    return len(str(shown[-1])) if shown else 1


def line_start(line: str) -> str:
    """Return the part of a line to show if nothing in it is marked."""
    return _shown(line[:MAX_LINE_WIDTH]) + ("..." if len(line) > MAX_LINE_WIDTH else "")


def _shown_lines(place: Place, lines: list[str]) -> range:
    if place.line is None or place.line > len(lines):
        return range(0)
    return range(max(1, place.line - CONTEXT), min(len(lines), place.line + CONTEXT) + 1)


def _cut(line: str, place: Place | None) -> tuple[str, str]:
    """Return the part of a line to show, and the carets to print under it."""
    if place is None or place.column is None:
        return line_start(line), ""
    start = min(place.column - 1, len(line))
    stop = max(_stop(place, line), start + 1)
    first = max(0, start - LEAD_IN) if stop > MAX_LINE_WIDTH else 0
    last = first + MAX_LINE_WIDTH
    before = ("..." if first else "") + _shown(line[first:start])
    marked = _shown(line[start : min(stop, last)])
    after = _shown(line[stop:last]) + ("..." if len(line) > last else "")
    return before + marked + after, " " * _width(before) + "^" * max(1, _width(marked))


def _stop(place: Place, line: str) -> int:
    if place.end_line is None or place.end_column is None:
        return place.column or 1
    if place.end_line != place.line:
        return len(line.rstrip())
    return min(place.end_column - 1, len(line))


def _shown(text: str) -> str:
    return printable(text.replace("\t", "    "))


def _width(text: str) -> int:
    """Return the width in terminal columns: wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    import unicodedata  # slow to import, and rarely needed

    # Mn and Me: marks on the previous character, also those that do not combine, such as a variation selector.
    shown = (char for char in text if unicodedata.category(char) not in ("Mn", "Me"))
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in shown)


def _read(file: str) -> str:
    import tokenize  # slow to import, and needed only if there are findings

    largest = LARGEST_NOTEBOOK_BYTES if file.endswith(NOTEBOOK) else LARGEST_BYTES
    try:
        status = os.stat(file)  # noqa: PTH116 (pathlib is slow to import)
        # No pipes and devices, which might never end.
        if not stat.S_ISREG(status.st_mode) or status.st_size > largest:
            return ""
        if file.endswith(NOTEBOOK):
            with open(file, encoding="utf-8-sig") as notebook:  # noqa: PTH123
                return notebook.read()
        with tokenize.open(file) as script:  # uses the encoding that the script declares
            return script.read()
    except (OSError, SyntaxError, ValueError, LookupError):  # missing, or not Python source in any encoding
        return ""


def _split(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _cells(text: str) -> dict[int | None, list[str]]:
    """Return the lines of each cell of a notebook, by number; empty if the notebook is invalid."""
    import json

    try:
        sources = [cell["source"] for cell in json.loads(text)["cells"]]
        codes = [source if isinstance(source, str) else "".join(source) for source in sources]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {number: _split(code) for number, code in enumerate(codes, 1)}
