"""A Python file: its text, its syntax tree, and the places of its nodes.

``ast`` counts columns in UTF-8 bytes from 0 and ignores encodings, line endings and notebook cells. A Script hides
that: places and edits count characters from 1, within a cell for notebooks, and ``file_text`` and ``file_bytes``
return the file unchanged except for the edits.
"""

from __future__ import annotations

import ast
import bisect
import functools
import itertools
import math
import os
import re
import stat
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ampwise.check.source.tree_walk import LEAVES, children, walk
from ampwise.errors import AmpwiseError
from ampwise.finding import Edit, Place

LARGEST_BYTES = 5_000_000  # a larger script is data; its tree takes two hundred times as much memory
LARGEST_NOTEBOOK_BYTES = 100_000_000  # a notebook contains its plots
NOTEBOOK = ".ipynb"
UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")

# PEP 263: a comment in the first two lines, the second only if the first is blank or a comment.
# As text, for `re` to compile at first use: few files have such a comment.
COOKIE = rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)"
BLANK = rb"^[ \t\f]*(?:#|$)"


class UnreadableFile(AmpwiseError):
    """A file that cannot be checked, with the reason in one line."""

    def __init__(self, path: str, reason: str, line: int | None = None) -> None:
        super().__init__(path, reason, line)  # all three, so that it can be pickled
        self.path, self.reason, self.line = path, reason, line

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class NotebookCell(NamedTuple):
    """Cell of a notebook: its number, counting all cells, and its lines in ``SourceScript.text``."""

    number: int
    first_line: int
    lines: int


class SourceScript:
    r"""The code of one file.

    ``text`` is the code with ``\n`` as the only line ending, without a byte order mark; for a notebook, all Python
    cells one below the other. ``parsed`` is what was parsed: the same lines, with a notebook's magics replaced.
    ``notes`` says what was left out. ``file_text`` returns the whole file, without its byte order mark, with a given
    text as its code.

    >>> script = script_from_text("loss.backward()\n", "train.py")
    >>> print(script.place(script.tree.body[0]))
    train.py:1:1
    """

    def __init__(
        self,
        path: str,
        text: str,
        tree: ast.Module,
        file_text: Callable[[str], str],
        *,
        parsed: str | None = None,
        cells: Sequence[NotebookCell] = (),
        notes: Sequence[str] = (),
        encoding: str = "utf-8",
        bom: bool = False,
    ) -> None:
        self.path, self.text, self.tree, self.notes = path, text, tree, tuple(notes)
        self.parsed = text if parsed is None else parsed
        self.cells = tuple(cells)
        self.encoding, self.bom = encoding, bom
        self.file_text = file_text
        self._is_ascii = text.isascii()
        self._ends: dict[int, list[int]] = {}

    # Places.

    @functools.cached_property
    def lines(self) -> list[str]:
        """Lines of ``text``, without their ends."""
        return self.text.split("\n")

    @functools.cached_property
    def indentation(self) -> list[float]:
        """By how much each line is indented: infinitely if it is blank, a comment or the end of a bracket."""
        bare = [line.lstrip() for line in self.lines]
        pairs = zip(self.lines, bare, strict=True)
        return [len(line) - len(text) if text and text[0] not in "#)]}" else math.inf for line, text in pairs]

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Parent of each node of the tree but the tree itself, each before those below it."""
        found: dict[ast.AST, ast.AST] = {}
        level: list[ast.AST] = [self.tree]
        while level:
            below: list[ast.AST] = []
            for node in level:
                if node.__class__ not in LEAVES:
                    inside = children(node)
                    found |= dict.fromkeys(inside, node)
                    below += inside
            level = below
        return found

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return (self.tree, *self.parents)

    def place(self, node: ast.AST) -> Place:
        """Return the place of ``node``, with lines and columns counted from 1."""
        (line, column), (end_line, end_column) = self.span(node)
        cell = None
        if self.cells:
            end_cell, end_line = self._in_cell(end_line)
            cell, line = self._in_cell(line)
            if end_cell != cell:  # the whole tree, which spans several cells
                end_line, end_column = line, column
        return Place(file=self.path, cell=cell, line=line, column=column, end_line=end_line, end_column=end_column)

    def span(self, node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first position of ``node`` and the first after it, as (line, column) of ``text``, from 1.

        Some nodes, such as arguments and the whole tree, have no position; their span is that of all nodes in them.
        """
        parts: list[Any] = [node] if hasattr(node, "lineno") else [p for p in walk(node) if hasattr(p, "lineno")]
        if not parts:
            return (1, 1), (1, 1)
        start = min([self._position(part.lineno, part.col_offset) for part in parts])
        ends = [self._position(part.end_lineno or part.lineno, part.end_col_offset or 0) for part in parts]
        # Before Python 3.12, nodes in a multi-line f-string may end before they start.
        return start, max(start, *ends)

    def segment(self, node: ast.AST) -> str:
        """Return the text of ``node``."""
        start, end = self.span(node)
        return self.text[self.offset(*start) : self.offset(*end)]

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that contains ``node``, or ``node`` itself if it is one."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def offset(self, line: int, column: int, cell: int | None = None) -> int:
        """Return the index in ``text`` of a position in ``text``, or in a cell if one is given."""
        if cell is not None:
            line += self._cell(cell).first_line - 1
        line = min(line, len(self.lines))
        return self._line_starts[line - 1] + min(column - 1, len(self.lines[line - 1]))

    def offsets(self, edit: Edit) -> tuple[int, int]:
        """Return the start and end in ``text`` of what ``edit`` replaces."""
        start = self.offset(edit.line, edit.column, edit.cell)
        return start, self.offset(edit.end_line, edit.end_column, edit.cell)

    def line_of(self, place: Place) -> int:
        """Return the line of ``text`` of a place in this file."""
        return (place.line or 1) + (self._cell(place.cell).first_line - 1 if place.cell is not None else 0)

    def _position(self, line: int, byte_offset: int) -> tuple[int, int]:
        """Convert the line and byte offset of ``ast`` to a line and column from 1, within the text."""
        line = min(max(line, 1), len(self.lines))
        text = self.lines[line - 1]
        if self._is_ascii or text.isascii():
            return line, min(max(byte_offset, 0), len(text)) + 1
        if line not in self._ends:  # a long line may have many nodes
            self._ends[line] = list(itertools.accumulate(len(character.encode()) for character in text))
        return line, bisect.bisect_right(self._ends[line], max(byte_offset, 0)) + 1

    @functools.cached_property
    def _line_starts(self) -> list[int]:
        return [0, *itertools.accumulate([len(line) + 1 for line in self.lines])]

    def _cell(self, number: int) -> NotebookCell:
        return self.cells[bisect.bisect_left(self.cells, number, key=lambda cell: cell.number)]

    def _in_cell(self, line: int) -> tuple[int | None, int]:
        """Return the number of the cell with a line of ``text``, and the line within it."""
        if not self.cells:
            return None, line
        cell = self.cells[max(0, bisect.bisect_right(self.cells, line, key=lambda cell: cell.first_line) - 1)]
        return cell.number, max(1, line - cell.first_line + 1)

    # Edits: they change nothing here; ``ampwise.check.apply_edits`` applies them.

    def edit(self, start_line: int, start_column: int, end_line: int, end_column: int, content: str) -> Edit:
        """Return an edit that replaces ``text`` from the start position up to the end position by ``content``."""
        cell, line = self._in_cell(start_line)
        return Edit(line, start_column, end_line - start_line + line, end_column, content, cell)

    def replace(self, node: ast.AST, content: str) -> Edit:
        """Return an edit that replaces ``node`` by ``content``."""
        start, end = self.span(node)
        return self.edit(*start, *end, content)

    def insert_before(self, node: ast.AST, code: str) -> Edit:
        """Return an edit that inserts ``code``, lines without indentation, before the statement of ``node``."""
        start, margin, shares_line = self._start(self._whole_statement(node))
        if shares_line:
            return self.edit(*start, *start, "; ".join(code.splitlines()) + "; ")
        return self.edit(*start, *start, margin.join(code.splitlines()) + margin)

    def insert_after(self, node: ast.AST | tuple[int, int], code: str) -> Edit:
        """Return an edit that inserts ``code``, lines without indentation, after the statement of ``node``.

        After a position, (line, column) of ``text``, it is inserted as it is.
        """
        if isinstance(node, tuple):
            return self.edit(*node, *node, code)
        statement = self._whole_statement(node)
        _, margin, shares_line = self._start(statement)
        _, end = self.span(statement)
        line = self.lines[end[0] - 1]
        rest = line[end[1] - 1 :].strip()
        ends_its_line = not rest or rest.startswith("#")
        if not ends_its_line or (shares_line and not hasattr(statement, "body")):
            return self.edit(*end, *end, "; " + "; ".join(code.splitlines()))
        stop = (end[0], len(line) + 1)
        return self.edit(*stop, *stop, margin + margin.join(code.splitlines()))

    def indentation_in(self, block: ast.If) -> str:
        """Return by how much the statements in ``block`` are indented."""
        lines = [self.lines[statement.lineno - 1] for statement in (block, block.body[0])]
        outer, inner = [line[: len(line) - len(line.lstrip(" \t\f"))] for line in lines]
        if len(inner) > len(outer) and inner.startswith(outer):
            return inner[len(outer) :]
        return "\t" if "\t" in outer else "    "  # all on one line

    def _whole_statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement of ``node``; for an ``elif``, its ``if``, since nothing can be inserted between."""
        statement = self.statement(node)
        while isinstance(statement, ast.If) and self.segment(statement).startswith("elif"):
            statement = self.statement(self.parents[statement])
        return statement

    def _start(self, statement: ast.stmt) -> tuple[tuple[int, int], str, bool]:
        """Return where a statement starts, its line break with indentation, and whether it shares its first line.

        It shares it if other code precedes it there, or the line before ends with a backslash.
        """
        first = [statement, *getattr(statement, "decorator_list", [])]
        line, column = min([self.span(node)[0] for node in first])
        text = self.lines[line - 1]
        at = text.rfind("@", 0, column - 1)
        if len(first) > 1 and at >= 0 and not text[:at].strip():  # a decorator's node starts after its @
            column = at + 1
        shares_line = (line > 1 and self.lines[line - 2].endswith("\\")) or bool(text[: column - 1].strip())
        margin = text[: len(text) - len(text.lstrip(" \t\f"))]
        return (line, column), f"\n{margin}", shares_line

    # Back to a file.

    def file_bytes(self, file_text: str) -> bytes:
        """Encode the text of a whole file in this file's encoding, with its byte order mark."""
        try:
            return (UTF8_BOM if self.bom else b"") + file_text.encode(self.encoding)
        except UnicodeError as error:
            reason = f"cannot be written in its encoding, {self.encoding}: {error.reason}"  # type: ignore[attr-defined]
            raise UnreadableFile(self.path, reason) from error


def read_script(path: str) -> SourceScript:
    """Read the script or notebook in a file; Unreadable if Python could not read it."""
    return script_from_bytes(read_bytes(path), path)


def read_bytes(path: str) -> bytes:
    """Read a file; Unreadable if it is not a regular file or too large to be code."""
    largest = LARGEST_NOTEBOOK_BYTES if path.endswith(NOTEBOOK) else LARGEST_BYTES
    try:
        status = os.stat(path)  # noqa: PTH116 (a Path costs more than the call)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise UnreadableFile(path, "not a file")
        if status.st_size > largest:
            raise UnreadableFile(path, f"larger than {largest // 1_000_000} MB, which is too large to check")
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except (OSError, ValueError) as error:
        raise UnreadableFile(path, os_error_reason(error)) from error


def script_from_bytes(data: bytes, path: str) -> SourceScript:
    """Make a script or notebook from the bytes of a file."""
    bom = data.startswith(UTF8_BOM)
    body = data[len(UTF8_BOM) :] if bom else data
    if path.endswith(NOTEBOOK):
        from ampwise.check.source.notebook import script_from_notebook

        return script_from_notebook(_decoded(body, "utf-8", path), path, bom=bom)
    encoding = _declared_encoding(body, path, bom)
    return _plain_script(_decoded(body, encoding, path), path, encoding, bom)


def script_from_text(text: str, path: str) -> SourceScript:
    """Make a script or notebook from a text, such as stdin or a fixed file."""
    raw = text.removeprefix("\ufeff")
    bom = raw != text
    if path.endswith(NOTEBOOK):
        from ampwise.check.source.notebook import script_from_notebook

        return script_from_notebook(raw, path, bom=bom)
    encoding = "utf-8"
    try:  # the encoding that the text declares, if it can be encoded in it
        declared = _declared_encoding(raw[:1000].encode("utf-8", "replace"), path, bom=False)
        raw.encode(declared)
        encoding = declared
    except (UnreadableFile, LookupError, ValueError):
        pass
    return _plain_script(raw, path, encoding, bom)


def parse(text: str, path: str) -> ast.Module:
    """Parse ``text``; Unreadable if Python cannot."""
    null = text.find("\0")
    if null >= 0:
        line = text.count("\n", 0, null) + 1
        raise UnreadableFile(path, f"not a text file: null byte at line {line}", line)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that of "\d"
            return ast.parse(text)
    except SyntaxError as error:
        # Python's line number may be beyond the last line.
        line = min(error.lineno or 1, text.count("\n") + 1)
        raise UnreadableFile(path, f"syntax error at line {line}: {error.msg}", line) from error
    except (RecursionError, MemoryError) as error:
        raise UnreadableFile(path, "nested too deeply for Python to parse") from error
    except ValueError as error:  # text that cannot be encoded as UTF-8, or a number with too many digits
        raise UnreadableFile(path, f"Python cannot parse it: {error}") from error


def with_newlines_of(raw: str, text: str) -> str:
    r"""Return ``text``, whose lines end in ``\n``, with the line endings of ``raw``, which it was made from.

    A new line gets the most common line ending of ``raw``.

    >>> with_newlines_of("a\r\nb\r\n", "a\nnew\nb\n")
    'a\r\nnew\r\nb\r\n'
    """
    if "\r" not in raw:
        return text
    ends = re.findall(r"\r\n|\r|\n", raw)
    usual = max(("\r\n", "\n", "\r"), key=ends.count)
    if len(set(ends)) == 1:
        return text.replace("\n", usual)
    import difflib

    old, new = normalised(raw).split("\n"), text.split("\n")
    kept: dict[int, str] = {}
    for _, start, stop, new_start, new_stop in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        # A changed line also keeps the line ending of the line that it replaces.
        kept.update(zip(range(new_start, new_stop), ends[start:stop], strict=False))
    return "".join(line + kept.get(number, usual) for number, line in enumerate(new[:-1])) + new[-1]


def _plain_script(raw: str, path: str, encoding: str, bom: bool) -> SourceScript:
    text = normalised(raw)
    file_text = functools.partial(with_newlines_of, raw)
    return SourceScript(path, text, parse(text, path), file_text, encoding=encoding, bom=bom)


def normalised(raw: str) -> str:
    r"""Return a text with ``\n`` as its only line ending."""
    return raw.replace("\r\n", "\n").replace("\r", "\n") if "\r" in raw else raw


def _declared_encoding(data: bytes, path: str, bom: bool) -> str:
    head = data[:1000]
    if b"coding" not in head:
        return "utf-8"
    lines = re.split(rb"\r\n|\r|\n", head, maxsplit=2)[:2]
    for number, line in enumerate(lines, 1):
        cookie = re.match(COOKIE, line)
        if cookie:
            encoding = cookie[1].decode("ascii", "replace")
            is_utf8 = encoding.lower().replace("_", "-").startswith(("utf-8", "utf8"))
            if bom and not is_utf8:
                reason = f"declares the encoding {encoding} in line {number} but starts with a UTF-8 byte order mark"
                raise UnreadableFile(path, reason, number)
            return "utf-8" if is_utf8 else encoding
        if not re.match(BLANK, line):
            break
    return "utf-8"


def decode_source(data: bytes, path: str) -> str:
    """Decode the bytes of a whole file that were not read from disk, such as stdin; Unreadable if they are not text."""
    bom = data.startswith(UTF8_BOM)
    body = data[len(UTF8_BOM) :] if bom else data
    encoding = "utf-8" if path.endswith(NOTEBOOK) else _declared_encoding(body, path, bom)
    return ("\ufeff" if bom else "") + _decoded(body, encoding, path)


def _decoded(data: bytes, encoding: str, path: str) -> str:
    try:
        return data.decode(encoding)
    except LookupError as error:
        raise UnreadableFile(path, f"declares the encoding {encoding!r}, which Python does not know") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        where = f"byte 0x{data[error.start]:02x} at line {line}"
        if encoding != "utf-8":
            reason = f"not {encoding}, the encoding it declares ({where})"
        elif data.startswith(UTF16_BOMS):
            reason = f"not UTF-8 ({where}); it looks like UTF-16, which Python does not read: save it as UTF-8"
        else:
            reason = f"not UTF-8 ({where}); save it as UTF-8, or declare its encoding in the first line (PEP 263)"
        raise UnreadableFile(path, reason, line) from error
    except (ValueError, AssertionError, OverflowError) as error:  # some codecs raise these
        raise UnreadableFile(path, f"is not {encoding}, the encoding it declares") from error


def os_error_reason(error: OSError | ValueError) -> str:
    """Return the reason of an operating-system error as a message."""
    import errno

    number = getattr(error, "errno", None)
    if number == errno.ELOOP:
        return "a loop of symbolic links"
    if number == errno.ENOENT:
        return "no such file or folder"
    return (getattr(error, "strerror", None) or str(error)).lower()  # ValueError: a null byte in the name
