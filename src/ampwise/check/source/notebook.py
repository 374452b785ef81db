r"""Notebooks: the Python cells of an ``.ipynb`` as one script, and back.

In the script's text, each Python cell follows a heading line that names it. Magics stay in that text, so that they
are written back unchanged; for parsing, they are replaced by valid code with as many lines. Only the ``source`` of
cells that were edited is rewritten; every other byte of the JSON stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ampwise.check.source.script import (
    LARGEST_BYTES,
    NotebookCell,
    SourceScript,
    UnreadableFile,
    normalised,
    parse,
    with_newlines_of,
)

KEEPS_PYTHON = {"time", "timeit", "capture", "prun", "memit"}  # cell magics that run the rest as Python
MOST_VALUES = 10_000_000  # in the JSON of a notebook: plots have many
MOST_TRIES = 50  # attempts to find the magics of a cell, one line at a time

CELL_MAGIC = re.compile(r"\s*%%\s*(\w*)")
LINE_MAGIC = re.compile(r"[ \t]*(?:[%!?]|[\w.*\[\]]+\?{1,2}[ \t]*$)")
ASSIGNED = re.compile(r"([ \t]*[^=#\"']+=[ \t]*)[!%]")
TIMED = re.compile(r"([ \t]*)(%time[ \t]+)(?=[^\s-])")
WHITESPACE = re.compile(r"[ \t\r\n]*")
# \uXXXX for a character that is not ASCII; Jupyter itself does not escape these.
ESCAPED = re.compile(r"\\u(?:00[89a-f]|0[1-9a-f]|[1-9a-f])", re.IGNORECASE)
DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class NotebookFile:
    """JSON of a notebook, and the numbers and sources of the cells that make up the script's text."""

    json_text: str
    sources: dict[int, str]  # with the original line endings
    marker: str

    def file_text(self, text: str) -> str:
        """Return the JSON with changed sources rewritten in its own style."""
        changed = {
            number: code for number, code in self._split(text).items() if code != normalised(self.sources[number])
        }
        top = _members(self.json_text, _skip(self.json_text, 0)) if changed else {}
        starts = [start for start, _ in _elements(self.json_text, top["cells"][0])] if changed else []
        escapes = self.json_text.isascii() and ESCAPED.search(self.json_text) is not None
        pieces, position = [], 0
        for number, code in changed.items():
            start, end = _members(self.json_text, starts[number - 1])["source"]
            new = with_newlines_of(self.sources[number], code)
            pieces += [self.json_text[position:start], _written(self.json_text[start:end], new, escapes)]
            position = end
        return "".join([*pieces, self.json_text[position:]])

    def join(self, codes: dict[int, str]) -> str:
        """Join the code of all cells into one text, each below its heading."""
        return "".join([f"{self._heading(number)}{code}\n" for number, code in codes.items()])

    def _heading(self, number: int) -> str:
        return f"# %% {self.marker} {number}\n"

    def _split(self, text: str) -> dict[int, str]:
        """Split a text into the code of its cells: the inverse of ``join``."""
        codes: list[str] = []
        for number in self.sources:
            before, heading, text = text.partition(self._heading(number))
            if not heading:
                raise ValueError(f"the edited text lacks the heading {self._heading(number)!r}")
            codes.append(before)
        parts = [code.removesuffix("\n") for code in [*codes[1:], text]]
        return dict(zip(self.sources, parts, strict=False))


def script_from_notebook(json_text: str, path: str, *, bom: bool = False) -> SourceScript:
    """Return the Python code of a notebook; UnreadableFile if it is not a valid notebook of format 4."""
    found = _code_sources(json_text, path)
    if sum(map(len, found.values())) > LARGEST_BYTES:
        limit = LARGEST_BYTES // 1_000_000
        raise UnreadableFile(path, f"its code is larger than {limit} MB, which is too large to check")
    texts: dict[int, str] = {}
    codes: dict[int, str] = {}
    notes, cells = [], []
    line = 1
    for number, raw in found.items():
        text = normalised(raw)
        code, trouble = _python(text, path)
        if code is not None:
            texts[number], codes[number] = text, code
            lines = text.count("\n") + 1
            cells.append(NotebookCell(number, line + 1, lines))  # below its heading
            line += lines + 1
        elif trouble:
            notes.append(f"cell {number} was not checked: {trouble}")
    # A word for the headings that no cell contains.
    taken = {dashes for text in texts.values() for dashes in re.findall(r"# %% cell(-*) ", text)}
    marker = "cell" + "-" * (max(map(len, taken), default=-1) + 1)
    file = NotebookFile(json_text, {number: found[number] for number in texts}, marker)
    parsed = file.join(codes)
    tree = parse(parsed, path)
    return SourceScript(path, file.join(texts), tree, file.file_text, parsed=parsed, cells=cells, notes=notes, bom=bom)


# Python code of a cell.


def _python(text: str, path: str) -> tuple[str | None, str | None]:
    """Return the code of a cell to parse, or None and the reason if it is worth reporting."""
    first, newline, rest = text.partition("\n")
    magic = CELL_MAGIC.match(first)
    if magic and magic[1] not in KEEPS_PYTHON:
        return None, None
    code = newline + rest if magic else text
    trouble = _trouble(code, path)
    if trouble is None:
        return code, None
    lines = code.split("\n")
    magics = [number for number, line in enumerate(lines) if LINE_MAGIC.match(line) or ASSIGNED.match(line)]
    code = _masked(lines, magics)
    if magics and _trouble(code, path) is None:
        return code, None
    # Mask only the lines that Python cannot parse: others that look like magics may be code within brackets.
    masked: list[int] = []
    while trouble is not None and len(masked) < MOST_TRIES:
        number = (trouble.line or 0) - 1
        if number not in magics or number in masked:
            break
        masked.append(number)
        code = _masked(lines, masked)
        trouble = _trouble(code, path)
    return (code, None) if trouble is None else (None, trouble.reason)


def _trouble(text: str, path: str) -> UnreadableFile | None:
    try:
        parse(text, path)
    except UnreadableFile as error:
        return error
    return None


def _masked(lines: list[str], magics: Sequence[int]) -> str:
    """Return the lines with magics, and their continuation lines, replaced."""
    masked = list(lines)
    for number in magics:
        line = lines[number]
        timed, assigned = TIMED.match(line), ASSIGNED.match(line)
        if timed:  # `%time model.fit()` runs the code after it: keep that in its column
            masked[number] = f"{timed[1]}{'0;':{len(timed[2])}}{line[timed.end() :]}"
        elif assigned and not LINE_MAGIC.match(line):
            masked[number] = f"{assigned[1]}None"
        else:
            masked[number] = line[: len(line) - len(line.lstrip(" \t"))] + "pass"
        while lines[number].endswith("\\") and number + 1 < len(lines):
            number += 1
            masked[number] = ""
    return "\n".join(masked)


# The JSON.


def _code_sources(text: str, path: str) -> dict[int, str]:
    """Return the source of each code cell by its number; none if the kernel does not run Python."""
    notebook = _loaded(text, path)
    version = notebook.get("nbformat") if isinstance(notebook, dict) else None
    if version is None:
        raise UnreadableFile(path, "not a notebook: its JSON has no nbformat")
    if isinstance(version, int) and version < 4:
        advice = "convert it to format 4: `jupyter nbconvert --to notebook --inplace FILE`"
        raise UnreadableFile(path, f"a notebook of format {version}; {advice}")
    if version != 4:
        raise UnreadableFile(path, f"a notebook of format {version!r}; only format 4 can be read")
    cells = notebook.get("cells", [])
    if not isinstance(cells, list):
        raise UnreadableFile(path, "a broken notebook: its cells are not a list")
    found: dict[int, str] = {}
    for number, cell in enumerate(cells if _is_python(notebook.get("metadata")) else (), 1):
        if not isinstance(cell, dict):
            raise UnreadableFile(path, f"a broken notebook: cell {number} is not an object")
        if cell.get("cell_type") == "code":
            source = cell.get("source")
            lines = [source] if isinstance(source, str) else source
            if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
                raise UnreadableFile(path, f"a broken notebook: cell {number} has no source")
            found[number] = "".join(lines)
    return found


def _loaded(text: str, path: str) -> Any:
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:  # parsed, they take many times their size
        limit = MOST_VALUES // 1_000_000
        raise UnreadableFile(path, f"a broken notebook: its JSON has more than {limit} million values")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UnreadableFile(path, "a broken notebook: its JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnreadableFile(path, f"a broken notebook: {error.msg} at line {error.lineno}", error.lineno) from error
    except ValueError as error:  # a number with too many digits
        raise UnreadableFile(path, f"a broken notebook: {error}") from error


def _is_python(metadata: Any) -> bool:
    """Whether the kernel runs Python, which is assumed if the metadata does not say."""
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        entry = metadata.get(key) if isinstance(metadata, dict) else None
        language = entry.get(name) if isinstance(entry, dict) else None
        if isinstance(language, str):
            return language.lower() in ("python", "ipython")
    return True


# Positions in the JSON, which the standard library's parser does not report.


def _members(text: str, position: int) -> dict[str, tuple[int, int]]:
    """Return the keys of the object at ``position``, each with the start and end of its value."""
    members = {}
    position = _skip(text, position + 1)
    while not text.startswith("}", position):
        key, position = DECODER.raw_decode(text, position)
        start = _skip(text, _skip(text, position) + 1)  # after the colon
        _, end = DECODER.raw_decode(text, start)
        members[str(key)] = (start, end)
        position = _next(text, end)
    return members


def _elements(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each element of the array at ``position``."""
    position = _skip(text, position + 1)
    while not text.startswith("]", position):
        _, end = DECODER.raw_decode(text, position)
        yield position, end
        position = _next(text, end)


def _next(text: str, position: int) -> int:
    """Return the position of the next member or of the closing bracket, in valid JSON."""
    position = _skip(text, position)
    return _skip(text, position + 1) if text.startswith(",", position) else position


def _skip(text: str, position: int) -> int:
    blanks = WHITESPACE.match(text, position)
    return blanks.end() if blanks else position


def _written(literal: str, new: str, escapes: bool) -> str:
    """Return ``new`` as JSON in the style of ``literal``: a string or an array of lines, with its whitespace."""
    if not literal.startswith("["):
        return json.dumps(new, ensure_ascii=escapes)
    spans = list(_elements(literal, 0)) or [(1, 1)]
    as_written = {json.loads(literal[start:end]): literal[start:end] for start, end in spans if end > start}
    lines = re.findall(r"[^\n]*\n|[^\n]+", new)  # with their ends, as Jupyter splits them
    opening = literal[: spans[0][0]]
    between = literal[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{opening[1:] or ' '}"
    rendered = [as_written.get(line) or json.dumps(line, ensure_ascii=escapes) for line in lines]
    return opening + between.join(rendered) + literal[spans[-1][1] :]
