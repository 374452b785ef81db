r"""The terminal: the one place that writes to people, and decides about colour, width, and what may reach them.

Names, messages and lines of source come from files and records that anybody may have made. None of that may act on a
terminal, so every command and every part of the library writes through this module (tests/printers/test_writing.py):

* ``say`` writes a line. Its template is ours; what is filled in is made ``printable``, so that it also stays one line.
* ``write`` writes a text that was put together elsewhere. Of the characters that act, only newlines, tabs and the
  styles of ``paint`` come through. Whoever puts the text together calls ``printable`` for what must not break lines.
* ``console`` is rich's, with the same done to the text of everything that it draws.
* ``write_exact`` is for files and pipes, which get the very bytes; a terminal gets text without any styles.
* ``redraw`` writes over the current line.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any, TextIO

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
    "printable_lines",
    "redraw",
    "say",
    "table",
    "wants_colour",
    "write",
    "write_exact",
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

# The styles that `write` lets through: bold, dim, italic, underlined and colours of the text that can be read on any
# background. Not those that hide text, blink or turn colours around. 36, 208 and 244 are rich-argparse's.
_STYLE = r"(?:[0-4]|3[1-79]|49|9[0-7]|38;5;(?:36|208|244))"
OUR_STYLES = rf"(\x1b\[{_STYLE}(?:;{_STYLE})*m)"
LINES = "\n\t"
ERASED = "\r\x1b[K"  # to the start of the line, and nothing from there on

# Letters and marks that nobody sees: fillers, joiners, and variation selectors but for the two that emoji have. A name
# with one in it looks like another name. (What Unicode calls a format character is not printable for Python, either.)
_UNSEEN = (0x034F, *range(0x115F, 0x1161), *range(0x17B4, 0x17B6), *range(0x180B, 0x1810), 0x3164, 0xFFA0)
UNSEEN = frozenset(map(chr, (*_UNSEEN, *range(0xFE00, 0xFE0E), *range(0xE0100, 0xE01F0))))


class CannotWrite(OSError):
    """The output could not be written: a full disk, a closed file. A reader who has gone is a BrokenPipeError."""

    def __str__(self) -> str:
        return f"cannot write the output: {self.strerror or ': '.join(map(str, self.args))}"


def console(file: TextIO | None = None, *, narrowest: int = NARROWEST) -> Console:
    """A rich console on which text is text: no markup, no emoji codes, no highlighting, nothing that acts.

    Colour only on a terminal and never under NO_COLOR; at least ``narrowest`` wide, or as wide as the terminal with 0.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Harmless(Console):
        """Cleans the text of what is drawn; styles and moves of the cursor are rich's own, and added afterwards."""

        def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*args, **options):
                text = encodable(printable_lines(segment.text), self.encoding)
                yield segment if segment.control else Segment(text, segment.style)

    stream = sys.stdout if file is None else file
    width = None if _is_terminal(stream) or "COLUMNS" in os.environ else PIPE_WIDTH
    plain = Harmless(
        file=stream,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=False,
        color_system="auto" if wants_colour(stream) else None,
    )
    if plain.width < narrowest:
        plain.width = narrowest
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
    _put("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()), sys.stdout)


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour: NO_COLOR says no, FORCE_COLOR yes, else only a terminal that is not a dumb one."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return _is_terminal(stream) and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, colour: bool) -> str:
    """``text`` in one of STYLES, or as it is."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if colour and text else text


def printable(text: str) -> str:
    r"""``text`` in one line, with whatever could move the cursor, hide or reorder characters made visible.

    Messages and file names come from other people's scripts, and a log is read by a person who trusts it.

    >>> print(printable("loss\x1b[2Jgone\nnext"))
    loss\x1b[2Jgone\nnext
    """
    return _cleaned(text)


def printable_lines(text: str, *, colour: bool = False) -> str:
    r"""The same for a text of several lines: newlines and tabs stay, with ``colour`` the styles of ``paint``, too.

    >>> print(printable_lines("loss\x1b[2Jgone\nnext"))
    loss\x1b[2Jgone
    next
    """
    if not colour or "\x1b" not in text:
        return _cleaned(text, LINES)
    import re  # which few runs need

    parts = re.split(OUR_STYLES, text)  # every second one is a style
    return "".join(part if number % 2 else _cleaned(part, LINES) for number, part in enumerate(parts))


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


def say(template: str, *fields: object, stream: TextIO | None = None) -> None:
    """Write a line, to stderr unless told otherwise: ``template`` is ours, and what is filled in may be anybody's."""
    stream = sys.stderr if stream is None else stream
    if stream is not None:  # Python has None where the shell closed it
        shown = (field if isinstance(field, (int, float)) else printable(str(field)) for field in fields)
        write(f"{template.format(*shown)}\n", stream)


def write(text: str, stream: TextIO) -> None:
    """Write a text, of which nothing acts but our own styles, ``encodable`` for the stream; else CannotWrite."""
    _put(printable_lines(text, colour=wants_colour(stream)), stream)


def write_exact(data: bytes, stream: TextIO, encoding: str = "utf-8") -> None:
    """Write these very bytes, for a file or another program; on a terminal, the text that they are."""
    buffer = getattr(stream, "buffer", None)
    if buffer is None or _is_terminal(stream):
        _put(printable_lines(data.decode(encoding, "backslashreplace").replace("\r\n", "\n")), stream)
        return
    with writing():
        stream.flush()
        buffer.write(data)
        stream.flush()


def redraw(line: str, stream: TextIO) -> None:
    """Write in the place of what is on the terminal's current line."""
    _put(f"{ERASED}{printable(line)}", stream)
    flush(stream)


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


def _put(text: str, stream: TextIO) -> None:
    """Write what is clean."""
    with writing():
        stream.write(encodable(text, getattr(stream, "encoding", None) or "utf-8"))


def _is_terminal(stream: TextIO) -> bool:
    """Whether a stream is one; what a program put in the place of stderr may know nothing of that."""
    asked = getattr(stream, "isatty", None)
    return bool(asked is not None and asked())


def _cleaned(text: str, kept: str = "") -> str:
    """``text`` with escapes in the place of what acts or hides, but for the characters that are to be kept."""
    plain = text
    for char in kept:
        plain = plain.replace(char, "")
    if plain.isprintable() and (plain.isascii() or UNSEEN.isdisjoint(plain)):
        return text
    return "".join(char if char in kept or _is_harmless(char) else _escaped(char) for char in text)


def _is_harmless(char: str) -> bool:
    if char.isprintable():
        return char not in UNSEEN
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
