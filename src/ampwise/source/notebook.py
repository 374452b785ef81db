r"""Notebooks: the Python cells of an ``.ipynb`` as one script, and back.

Each cell of Python stands in the script's text below a line that names it. Magics stay in that text, so that they
are written back as they were; for parsing, something of as many lines that parses takes their place. Only the
``source`` of a cell that was edited is written anew; every other byte of the JSON stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ampwise.source.script import LARGEST_BYTES, Cell, Script, Unreadable, parse, with_newlines_of

__all__ = ["notebook_script"]

KEEPS_PYTHON = {"time", "timeit", "capture", "prun", "memit"}  # cell magics that run the rest as Python
MOST_VALUES = 10_000_000  # in the JSON of a notebook: plots have many
MOST_TRIES = 50  # to find out which lines of a cell are magics, one at a time

CELL_MAGIC = re.compile(r"\s*%%\s*(\w*)")
LINE_MAGIC = re.compile(r"[ \t]*(?:[%!?]|[\w.*\[\]]+\?{1,2}[ \t]*$)")
ASSIGNED = re.compile(r"([ \t]*[^=#\"']+=[ \t]*)[!%]")
TIMED = re.compile(r"([ \t]*)(%time[ \t]+)(?=[^\s-])")
INDENT = re.compile(r"[ \t]*")
WHITESPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one code cell; ``raw`` has the line endings as they were found."""

    number: int
    raw: str

    @property
    def text(self) -> str:
        return self.raw.replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True, slots=True)
class NotebookFile:
    """The JSON of a notebook, and the sources in it that are the script's text."""

    json_text: str
    marker: str
    sources: tuple[Source, ...]

    def file_text(self, text: str) -> str:
        """The JSON with the sources that differ written anew, in the style it has."""
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
        """One text of the code of all cells, each below its line with the marker."""
        named = zip(self.sources, codes, strict=True)
        return "".join(f"{self.heading(source)}{code}\n" for source, code in named)

    def heading(self, source: Source) -> str:
        return f"# %% {self.marker} {source.number}\n"

    def _split(self, text: str) -> list[str]:
        """The inverse of ``join``."""
        codes = []
        for source in self.sources:
            before, heading, text = text.partition(self.heading(source))
            if not heading:
                raise ValueError(f"the text has lost the line {self.heading(source)!r}")
            codes.append(before)
        return [code.removesuffix("\n") for code in [*codes[1:], text]][: len(self.sources)]


def notebook_script(json_text: str, path: str, *, bom: bool = False) -> Script:
    """The Python of a notebook; Unreadable when the JSON is broken or no notebook of format 4."""
    sources, notes = [], []
    codes = []
    found = list(_code_sources(json_text, path))
    if sum(len(source.raw) for source in found) > LARGEST_BYTES:
        raise Unreadable(path, f"its code is larger than {LARGEST_BYTES // 1_000_000} MB, which is no code")
    for source in found:
        code, trouble = _python(source.text, path)
        if code is not None:
            sources.append(source)
            codes.append(code)
        elif trouble:
            notes.append(f"cell {source.number} is left out: {trouble}")
    file = NotebookFile(json_text, _marker(sources), tuple(sources))
    parsed = file.join(codes)
    return Script(
        path,
        file.join([source.text for source in sources]),
        parse(parsed, path),
        file,
        parsed=parsed,
        cells=_cells(sources),
        notes=notes,
        bom=bom,
    )


def _cells(sources: Sequence[Source]) -> list[Cell]:
    cells, line = [], 1
    for source in sources:
        lines = source.text.count("\n") + 1
        cells.append(Cell(source.number, line + 1, lines))  # below its heading
        line += lines + 1
    return cells


def _marker(sources: Sequence[Source]) -> str:
    """A word that no cell contains, to know the headings by."""
    taken = {dashes for source in sources for dashes in re.findall(r"# %% cell(-*) ", source.text)}
    return "cell" + "-" * (max(map(len, taken), default=-1) + 1)


# Which cells are Python, and what of them.


def _python(text: str, path: str) -> tuple[str | None, str | None]:
    """What to parse for a cell, or None and, if that is worth saying, why."""
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
    return _one_at_a_time(lines, set(magics), path, trouble)


def _one_at_a_time(lines: list[str], magics: set[int], path: str, trouble: Unreadable) -> tuple[str | None, str | None]:
    """Take for magics only the lines that Python stumbles over: others may lie within brackets."""
    stumbled: list[int] = []
    while trouble.line is not None and trouble.line - 1 in magics - set(stumbled) and len(stumbled) < MOST_TRIES:
        stumbled.append(trouble.line - 1)
        code = _masked(lines, stumbled)
        found = _trouble(code, path)
        if found is None:
            return code, None
        trouble = found
    return None, trouble.reason


def _trouble(text: str, path: str) -> Unreadable | None:
    try:
        parse(text, path)
    except Unreadable as error:
        return error
    return None


def _masked(lines: list[str], magics: Sequence[int]) -> str:
    """The lines with those that are magics replaced, and with them the lines they are continued on."""
    masked = list(lines)
    for number in magics:
        masked[number] = _mask(lines[number])
        while lines[number].endswith("\\") and number + 1 < len(lines):
            number += 1
            masked[number] = ""
    return "\n".join(masked)


def _mask(line: str) -> str:
    timed = TIMED.match(line)
    if timed:  # `%time model.fit()` runs the rest: keep it, and its column
        return f"{timed[1]}{'0;':{len(timed[2])}}{line[timed.end() :]}"
    assigned = ASSIGNED.match(line)
    if assigned and not LINE_MAGIC.match(line):
        return f"{assigned[1]}None"
    indent = INDENT.match(line)
    return f"{indent[0] if indent else ''}pass"


# The JSON.


def _code_sources(text: str, path: str) -> Iterator[Source]:
    notebook = _loaded(text, path)
    version = notebook.get("nbformat") if isinstance(notebook, dict) else None
    if version != 4:
        _refuse_version(path, version)
    cells = notebook.get("cells", [])
    if not isinstance(cells, list):
        raise Unreadable(path, "a broken notebook: its cells are no list")
    if not _speaks_python(notebook.get("metadata")):
        return
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict):
            raise Unreadable(path, f"a broken notebook: cell {number} is no object")
        if cell.get("cell_type") == "code":
            yield Source(number, _source(cell, number, path))


def _loaded(text: str, path: str) -> Any:
    import json

    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:  # each takes many times its text in memory
        raise Unreadable(path, f"a broken notebook: its JSON has more than {MOST_VALUES // 1_000_000} million values")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise Unreadable(path, "a broken notebook: its JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise Unreadable(path, f"a broken notebook: {error.msg} at line {error.lineno}", error.lineno) from error
    except ValueError as error:  # a number with too many digits
        raise Unreadable(path, f"a broken notebook: {error}") from error


def _refuse_version(path: str, version: object) -> NoReturn:
    if isinstance(version, int) and version < 4:
        raise Unreadable(
            path,
            f"a notebook of format {version}; convert it to format 4: `jupyter nbconvert --to notebook --inplace FILE`",
        )
    if version is None:
        raise Unreadable(path, "not a notebook: its JSON has no nbformat")
    raise Unreadable(path, f"a notebook of format {version!r}; only format 4 can be read")


def _speaks_python(metadata: Any) -> bool:
    """Whether the kernel runs Python; one that does not say is taken to."""
    if not isinstance(metadata, dict):
        return True
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        told = metadata.get(key)
        language = told.get(name) if isinstance(told, dict) else None
        if isinstance(language, str):
            return language.lower() in ("python", "ipython")
    return True


def _source(cell: dict[str, Any], number: int, path: str) -> str:
    source = cell.get("source")
    if isinstance(source, str):
        return source
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        return "".join(source)
    raise Unreadable(path, f"a broken notebook: cell {number} has no source")


# Where things are in the JSON: the standard library parses it, but does not say.


def _source_spans(text: str) -> dict[int, tuple[int, int]]:
    """The start and end of the source of each cell that has one, by the cell's number."""
    top = _members(text, _skip(text, 0))
    cells = enumerate(_elements(text, top["cells"][0]), 1)
    members = ((number, _members(text, start)) for number, start in cells)
    return {number: found["source"] for number, found in members if "source" in found}


def _members(text: str, position: int) -> dict[str, tuple[int, int]]:
    """The keys of the object at ``position``, each with the start and end of its value."""
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
    """Where the elements of the array at ``position`` start."""
    from json.decoder import JSONDecoder

    decode = JSONDecoder().raw_decode
    position = _skip(text, position + 1)
    while not text.startswith("]", position):
        yield position
        _, end = decode(text, position)
        position = _next(text, end)


def _next(text: str, position: int) -> int:
    """Where the next member starts, or the closing bracket stands. The text is known to be JSON."""
    position = _skip(text, position)
    return _skip(text, position + 1) if text.startswith(",", position) else position


def _skip(text: str, position: int) -> int:
    blanks = WHITESPACE.match(text, position)
    return blanks.end() if blanks else position


# Writing a source as the one it replaces was written.


def _written(literal: str, new: str, escapes: bool) -> str:
    """``new`` as JSON: a string or an array of lines, as ``literal`` is, with its line breaks and blanks."""
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
    """Lines with their ends, as Jupyter splits them."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _escapes(json_text: str) -> bool:
    r"""Whether the file has ``\uXXXX`` for what is not ASCII; Jupyter itself writes it plainly."""
    return json_text.isascii() and re.search(r"\\u(?:00[89a-f]|0[1-9a-f]|[1-9a-f])", json_text, re.I) is not None
