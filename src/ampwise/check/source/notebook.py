r"""Notebooks: the Python cells of an ``.ipynb`` as one script, and back.

In the script's text, each Python cell follows a heading line that names it. Magics stay in that text, so that they
are written back unchanged; for parsing, they are replaced by valid code with as many lines. Only the ``source`` of
cells that were edited is rewritten; every other byte of the JSON stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ampwise.check.source.script import (
    LARGEST_BYTES,
    NotebookCell,
    SourceScript,
    UnreadableFile,
    parse,
    with_newlines_of,
)

__all__ = ["script_from_notebook"]

KEEPS_PYTHON = {"time", "timeit", "capture", "prun", "memit"}  # cell magics that run the rest as Python
MOST_VALUES = 10_000_000  # in the JSON of a notebook: plots have many
MOST_TRIES = 50  # attempts to find the magics of a cell, one line at a time

CELL_MAGIC = re.compile(r"\s*%%\s*(\w*)")
LINE_MAGIC = re.compile(r"[ \t]*(?:[%!?]|[\w.*\[\]]+\?{1,2}[ \t]*$)")
ASSIGNED = re.compile(r"([ \t]*[^=#\"']+=[ \t]*)[!%]")
TIMED = re.compile(r"([ \t]*)(%time[ \t]+)(?=[^\s-])")
INDENT = re.compile(r"[ \t]*")
WHITESPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class CellSource:
    """Source of one code cell; ``raw`` has the original line endings."""

    number: int
    raw: str

    @property
    def text(self) -> str:
        return self.raw.replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True, slots=True)
class NotebookFile:
    """JSON of a notebook, and the sources in it that make up the script's text."""

    json_text: str
    marker: str
    sources: tuple[CellSource, ...]

    def file_text(self, text: str) -> str:
        """Return the JSON with changed sources rewritten in its own style."""
        new_codes = zip(self.sources, self._split(text), strict=True)
        changed = {source: code for source, code in new_codes if code != source.text}
        spans = _source_spans(self.json_text) if changed else {}
        pieces, position = [], 0
        for source, code in changed.items():
            start, end = spans[source.number]
            literal = self.json_text[start:end]
            written = _written(literal, with_newlines_of(source.raw, code), _escapes(self.json_text))
            pieces += [self.json_text[position:start], written]
            position = end
        return "".join([*pieces, self.json_text[position:]])

    def join(self, codes: Sequence[str]) -> str:
        """Join the code of all cells into one text, each below its heading."""
        named = zip(self.sources, codes, strict=True)
        return "".join(f"{self.heading(source)}{code}\n" for source, code in named)

    def heading(self, source: CellSource) -> str:
        return f"# %% {self.marker} {source.number}\n"

    def _split(self, text: str) -> list[str]:
        """Split a text into the code of its cells: the inverse of ``join``."""
        codes = []
        for source in self.sources:
            before, heading, text = text.partition(self.heading(source))
            if not heading:
                raise ValueError(f"the edited text lacks the heading {self.heading(source)!r}")
            codes.append(before)
        return [code.removesuffix("\n") for code in [*codes[1:], text]][: len(self.sources)]


def script_from_notebook(json_text: str, path: str, *, bom: bool = False) -> SourceScript:
    """Return the Python code of a notebook; Unreadable if it is not a valid notebook of format 4."""
    sources, notes = [], []
    codes = []
    found = list(_code_sources(json_text, path))
    if sum(len(source.raw) for source in found) > LARGEST_BYTES:
        raise UnreadableFile(
            path, f"its code is larger than {LARGEST_BYTES // 1_000_000} MB, which is too large to check"
        )
    for source in found:
        code, trouble = _python(source.text, path)
        if code is not None:
            sources.append(source)
            codes.append(code)
        elif trouble:
            notes.append(f"cell {source.number} was not checked: {trouble}")
    file = NotebookFile(json_text, _marker(sources), tuple(sources))
    parsed = file.join(codes)
    return SourceScript(
        path,
        file.join([source.text for source in sources]),
        parse(parsed, path),
        file,
        parsed=parsed,
        cells=_cells(sources),
        notes=notes,
        bom=bom,
    )


def _cells(sources: Sequence[CellSource]) -> list[NotebookCell]:
    cells, line = [], 1
    for source in sources:
        lines = source.text.count("\n") + 1
        cells.append(NotebookCell(source.number, line + 1, lines))  # below its heading
        line += lines + 1
    return cells


def _marker(sources: Sequence[CellSource]) -> str:
    """Return a word for the headings that no cell contains."""
    taken = {dashes for source in sources for dashes in re.findall(r"# %% cell(-*) ", source.text)}
    return "cell" + "-" * (max(map(len, taken), default=-1) + 1)


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
    masked = _masked(lines, magics)
    if magics and _trouble(masked, path) is None:
        return masked, None
    return _mask_one_at_a_time(lines, set(magics), path, trouble)


def _mask_one_at_a_time(
    lines: list[str], magics: set[int], path: str, trouble: UnreadableFile
) -> tuple[str | None, str | None]:
    """Mask only the lines that Python cannot parse: others that look like magics may be code within brackets."""
    masked: list[int] = []
    while trouble.line is not None and trouble.line - 1 in magics - set(masked) and len(masked) < MOST_TRIES:
        masked.append(trouble.line - 1)
        code = _masked(lines, masked)
        found = _trouble(code, path)
        if found is None:
            return code, None
        trouble = found
    return None, trouble.reason


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
        masked[number] = _mask(lines[number])
        while lines[number].endswith("\\") and number + 1 < len(lines):
            number += 1
            masked[number] = ""
    return "\n".join(masked)


def _mask(line: str) -> str:
    timed = TIMED.match(line)
    if timed:  # `%time model.fit()` runs the code after it: keep that in its column
        return f"{timed[1]}{'0;':{len(timed[2])}}{line[timed.end() :]}"
    assigned = ASSIGNED.match(line)
    if assigned and not LINE_MAGIC.match(line):
        return f"{assigned[1]}None"
    indent = INDENT.match(line)
    return f"{indent[0] if indent else ''}pass"


# The JSON.


def _code_sources(text: str, path: str) -> Iterator[CellSource]:
    notebook = _loaded(text, path)
    version = notebook.get("nbformat") if isinstance(notebook, dict) else None
    if version != 4:
        _refuse_version(path, version)
    cells = notebook.get("cells", [])
    if not isinstance(cells, list):
        raise UnreadableFile(path, "a broken notebook: its cells are not a list")
    if not _is_python(notebook.get("metadata")):
        return
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict):
            raise UnreadableFile(path, f"a broken notebook: cell {number} is not an object")
        if cell.get("cell_type") == "code":
            yield CellSource(number, _source(cell, number, path))


def _loaded(text: str, path: str) -> Any:
    import json

    if (
        text.count(",") + text.count("[") + text.count("{") > MOST_VALUES
    ):  # parsed, they take many times their size in memory
        raise UnreadableFile(
            path, f"a broken notebook: its JSON has more than {MOST_VALUES // 1_000_000} million values"
        )
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UnreadableFile(path, "a broken notebook: its JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnreadableFile(path, f"a broken notebook: {error.msg} at line {error.lineno}", error.lineno) from error
    except ValueError as error:  # a number with too many digits
        raise UnreadableFile(path, f"a broken notebook: {error}") from error


def _refuse_version(path: str, version: object) -> NoReturn:
    if isinstance(version, int) and version < 4:
        raise UnreadableFile(
            path,
            f"a notebook of format {version}; convert it to format 4: `jupyter nbconvert --to notebook --inplace FILE`",
        )
    if version is None:
        raise UnreadableFile(path, "not a notebook: its JSON has no nbformat")
    raise UnreadableFile(path, f"a notebook of format {version!r}; only format 4 can be read")


def _is_python(metadata: Any) -> bool:
    """Whether the kernel runs Python, which is assumed if the metadata does not say."""
    if not isinstance(metadata, dict):
        return True
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        entry = metadata.get(key)
        language = entry.get(name) if isinstance(entry, dict) else None
        if isinstance(language, str):
            return language.lower() in ("python", "ipython")
    return True


def _source(cell: dict[str, Any], number: int, path: str) -> str:
    source = cell.get("source")
    if isinstance(source, str):
        return source
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        return "".join(source)
    raise UnreadableFile(path, f"a broken notebook: cell {number} has no source")


# Positions in the JSON, which the standard library's parser does not report.


def _source_spans(text: str) -> dict[int, tuple[int, int]]:
    """Return the start and end of each cell's source, by the cell's number."""
    top = _members(text, _skip(text, 0))
    cells = enumerate(_elements(text, top["cells"][0]), 1)
    members = ((number, _members(text, start)) for number, start in cells)
    return {number: found["source"] for number, found in members if "source" in found}


def _members(text: str, position: int) -> dict[str, tuple[int, int]]:
    """Return the keys of the object at ``position``, each with the start and end of its value."""
    from json.decoder import JSONDecoder

    decode = JSONDecoder().raw_decode
    members = {}
    position = _skip(text, position + 1)
    while not text.startswith("}", position):
        key, position = decode(text, position)
        start = _skip(text, _skip(text, position) + 1)  # after the colon
        _, end = decode(text, start)
        members[str(key)] = (start, end)
        position = _next(text, end)
    return members


def _elements(text: str, position: int) -> Iterator[int]:
    """Yield the positions at which the elements of the array at ``position`` start."""
    from json.decoder import JSONDecoder

    decode = JSONDecoder().raw_decode
    position = _skip(text, position + 1)
    while not text.startswith("]", position):
        yield position
        _, end = decode(text, position)
        position = _next(text, end)


def _next(text: str, position: int) -> int:
    """Return the position of the next member or of the closing bracket, in valid JSON."""
    position = _skip(text, position)
    return _skip(text, position + 1) if text.startswith(",", position) else position


def _skip(text: str, position: int) -> int:
    blanks = WHITESPACE.match(text, position)
    return blanks.end() if blanks else position


# Writing a source in the style of the one it replaces.


def _written(literal: str, new: str, escapes: bool) -> str:
    """Return ``new`` as JSON in the style of ``literal``: a string or an array of lines, with its whitespace."""
    import json

    if not literal.startswith("["):
        return json.dumps(new, ensure_ascii=escapes)
    spans = _string_spans(literal)
    as_written = {json.loads(literal[start:end]): literal[start:end] for start, end in spans}
    lines = [as_written.get(line) or json.dumps(line, ensure_ascii=escapes) for line in _lines(new)]
    opening = literal[: spans[0][0]]
    between = literal[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{opening[1:] or ' '}"
    return opening + between.join(lines) + literal[spans[-1][1] :]


def _string_spans(literal: str) -> list[tuple[int, int]]:
    from json.decoder import JSONDecoder

    decode = JSONDecoder().raw_decode
    return [(start, decode(literal, start)[1]) for start in _elements(literal, 0)] or [(1, 1)]


def _lines(text: str) -> list[str]:
    """Split a text into lines with their ends, as Jupyter does."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _escapes(json_text: str) -> bool:
    r"""Whether the file has ``\uXXXX`` for non-ASCII characters; Jupyter itself does not escape them."""
    return json_text.isascii() and re.search(r"\\u(?:00[89a-f]|0[1-9a-f]|[1-9a-f])", json_text, re.I) is not None
