"""The terminal: one place that decides about colour, width, and what may be written to it."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console
    from rich.table import Table

__all__ = [
    "CannotWrite",
    "console",
    "encodable",
    "flush",
    "paint",
    "print_tables",
    "printable",
    "table",
    "wants_colour",
    "write",
    "writing",
]

PIPE_WIDTH = 110  # where nobody told us the width: a file, a pipe, a CI log
NARROWEST = 80  # a terminal that wraps a table shows all of it; a table squeezed into less does not

# Our own signs, where the stream has none such: as one types them.
INSTEAD = {"→": "->", "−": "-", "–": "-", "·": "-", "…": "...", "×": "x", "÷": "/", "≈": "~", "µ": "u"}
RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")

STYLES = {
    "error": "1;31",
    "warning": "1;33",
    "info": "1;36",
    "ok": "32",
    "bold": "1",
    "dim": "2",
    "code": "1;31",
    "gutter": "1;34",
    "help": "1;32",
    "mended": "36",
    "added": "32",
    "removed": "31",
}


class CannotWrite(OSError):
    """The output could not be written: a full disk, a closed file. A reader who has gone is a BrokenPipeError."""

    def __str__(self) -> str:
        return f"cannot write the output: {self.strerror or ': '.join(map(str, self.args))}"


def console(file: TextIO | None = None) -> Console:
    """A rich console: colour only on a terminal and never under NO_COLOR, no highlighting, at least 80 wide."""
    from rich.console import Console

    stream = sys.stdout if file is None else file
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    plain = Console(
        file=stream,
        width=width,
        highlight=False,
        soft_wrap=False,
        color_system="auto" if wants_colour(stream) else None,
    )
    if plain.width < NARROWEST:
        plain.width = NARROWEST
    return plain


def table(*headings: str) -> Table:
    """A table without lines: columns two blanks apart, dim headings, nothing wrapped."""
    from rich.table import Table

    plain = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in headings:
        plain.add_column(heading, no_wrap=True)
    return plain


def print_tables(show: Callable[[Console], None]) -> None:
    """Write what ``show`` prints, less the blanks with which rich fills each line of a table."""
    out = console()
    with writing(), out.capture() as captured:  # rich ends a capture with a write of nothing, which can fail
        show(out)
    write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()), sys.stdout)


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour: NO_COLOR says no, FORCE_COLOR yes, else only a terminal that is not a dumb one."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, colour: bool) -> str:
    """``text`` in one of STYLES, or as it is."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if colour and text else text


def printable(text: str) -> str:
    r"""``text`` with whatever could move the cursor, hide or reorder characters made visible.

    Messages and file names come from other people's scripts, and a log is read by a person who trusts it.

    >>> print(printable("loss\x1b[2Jgone\nnext"))
    loss\x1b[2Jgone\nnext
    """
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) else _escaped(char) for char in text)


def encodable(text: str, encoding: str) -> str:
    r"""``text`` in characters that ``encoding`` has: our own signs as one types them, the rest as escapes.

    >>> print(encodable("2⁻¹⁴ → 0 of caf\xe9, 40 × …", "ascii"))
    2^-14 -> 0 of caf\xe9, 40 x ...
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        import re  # which few terminals need

        flat = re.sub("[⁻⁰¹²³⁴-⁹]+", lambda raised: f"^{raised[0].translate(RAISED)}", text)
        return flat.encode(encoding, _INSTEAD).decode(encoding)
    return text


def write(text: str, stream: TextIO) -> None:
    """Write ``text``, made ``encodable`` for the stream; CannotWrite if that fails."""
    with writing():
        stream.write(encodable(text, getattr(stream, "encoding", None) or "utf-8"))


def flush(stream: TextIO) -> None:
    """Hand on what was written; CannotWrite if that fails."""
    with writing():
        stream.flush()


@contextmanager
def writing() -> Iterator[None]:
    """Make an error of the system a CannotWrite, to tell a full disk from a file that a verb did not find."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CannotWrite(*error.args) from error


def _is_harmless(char: str) -> bool:
    if char.isprintable():
        return True
    import unicodedata  # a library of its own, which few runs need

    # Zs: the no-break and the ideographic space are ordinary in text, though Python calls them unprintable.
    return unicodedata.category(char) == "Zs"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _instead(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(
        INSTEAD.get(char) or char.encode("ascii", "backslashreplace").decode() for char in missing
    ), error.end


_INSTEAD = "ampwise-instead"
codecs.register_error(_INSTEAD, _instead)
