"""The line of a place, with carets under the call: from the file, or from a record.

A record has its own copy of the lines, because the script may have changed since it ran.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from ampwise.finding import Place
from ampwise.finding.terminal import paint, printable

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from ampwise.runs.rows import CountedFinding

CONTEXT = 2  # lines before and after, on a page
INDENT = "  "
MAX_LINE_WIDTH = 160  # characters of a line to show; a line of data can be a megabyte
LEAD_IN = 40  # characters to show before the span when the line is cut
LARGEST_BYTES = 10_000_000  # a larger file is not a script
LARGEST_NOTEBOOK_BYTES = 100_000_000  # a notebook contains its images
LAST_LINE = 1_000_000  # a record with a higher line number is damaged
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

    def line(self, place: Place) -> str:
        """Return the line of a place; "" if it has none, or the file no longer has that line."""
        lines = [] if place.file is None else self.lines(place.file, place.cell)
        return "" if place.line is None or place.line > len(lines) else lines[place.line - 1]


def excerpt(place: Place, sources: SourceFiles, colour: bool = False, width: int | None = None) -> list[str]:
    """Return the line of ``place`` with its number, and carets under what is marked; nothing if there is no line.

    width: of the terminal, at which a long line is cut.
    """
    return _drawn(place, sources.line(place), colour, width)


def _drawn(place: Place, line: str, colour: bool, width: int | None = None) -> list[str]:
    if not line.strip():
        return []
    around = len(f"{INDENT}{place.line} | ") + 2 * len("...")
    code, marks = _cut(line, place, MAX_LINE_WIDTH if width is None else min(width - around, MAX_LINE_WIDTH))
    gutter = paint(f"{place.line} |", "gutter", colour), paint(f"{'':{len(str(place.line))}} |", "gutter", colour)
    shown = [f"{INDENT}{gutter[0]} {code}"]
    return [*shown, f"{INDENT}{gutter[1]} {paint(marks, 'error', colour)}"] if marks else shown


def _cut(line: str, place: Place, most: int = MAX_LINE_WIDTH) -> tuple[str, str]:
    """Return the part of a line to show, without indentation, and the carets to print under it."""
    indent = len(line) - len(line.lstrip())
    line = line.strip()
    if place.column is None:
        return _shown(line[:most]) + ("..." if len(line) > most else ""), ""
    start = min(max(place.column - 1 - indent, 0), len(line))
    if place.end_line is None or place.end_column is None:
        stop = start + 1
    else:
        stop = len(line) if place.end_line != place.line else min(place.end_column - 1 - indent, len(line))
        is_all = start == 0 and line[stop:].lstrip()[:1] in ("", "#")
        if is_all or place.end_line != place.line:
            stop = start + _called(line[start:stop])
    stop = max(stop, start + 1)
    first = max(0, start - LEAD_IN) if stop > most else 0
    last = first + most
    before = ("..." if first else "") + _shown(line[first:start])
    marked = _shown(line[start : min(stop, last)])
    after = _shown(line[stop:last]) + ("..." if len(line) > last else "")
    return before + marked + after, " " * _width(before) + "^" * max(1, _width(marked))


def _called(text: str) -> int:
    """Return the length of the name that is called, if ``text`` is a call or the first line of one; else its length.

    >>> _called("nn.utils.clip_grad_norm_(model.parameters(), 1.0)"), _called("scaler.scale(loss).backward()")
    (24, 27)
    >>> _called("torch.save({"), _called("norm = clip(x)")
    (10, 14)
    """
    depth, end = 0, len(text)
    if not text.partition("(")[0].replace(".", "").isidentifier():
        return end
    for position, character in enumerate(text):
        if character in "([{":
            end = position if character == "(" and not depth else end
            depth += 1
        elif character in ")]}":
            depth -= 1
    return end


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


# --- lines of a record ---------------------------------------------------------------------------------------------


def recorded_lines(counted: CountedFinding, context: int = CONTEXT) -> dict[int, str]:
    """Return the lines around the finding, by number; none if the record has no lines for its place."""
    first, lines = counted.excerpt.get("first_line"), counted.excerpt.get("lines")
    line = counted.finding.place.line
    if line is None or not isinstance(first, int) or not isinstance(lines, list) or not 1 <= first <= LAST_LINE:
        return {}
    numbered = dict(enumerate(map(str, lines), first))
    near = {number: text for number, text in numbered.items() if abs(number - line) <= context}
    return near if line in near else {}


def recorded_excerpt(counted: CountedFinding, colour: bool) -> list[str]:
    """Return the line of a finding with its number, and carets under the call, as the linter shows it."""
    place = counted.finding.place
    return _drawn(place, recorded_lines(counted).get(place.line or 0, ""), colour)
