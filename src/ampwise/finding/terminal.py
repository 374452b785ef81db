r"""Write to the terminal: decide about colour and width, and neutralize control characters.

Names, messages and source lines come from untrusted files and records. None of them may control the terminal, so every
command and every part of the library writes through this module (tests/report/printers/test_writing.py):

* ``say`` writes a line. Its template is trusted; the fields are made ``printable``, so that the line stays one line.
* ``write`` writes a prepared text. Of the control characters, only newlines, tabs and the styles of ``paint`` remain.
  Callers use ``printable`` for parts that must not break lines.
* ``console`` is a rich console that cleans the text of everything it draws in the same way.
* ``write_exact`` is for files and pipes, which get the exact bytes; a terminal gets text without styles.
* ``redraw`` overwrites the current line, ``start_line`` begins one where a script may have left one unfinished.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 110  # width where it is unknown: a file, a pipe, a CI log
NARROWEST = 80  # narrower, a wrapped table still shows everything and a squeezed one does not

# ASCII replacements for the symbols that ampwise prints, for streams that cannot encode them.
ASCII_REPLACEMENTS = {
    "→": "->",
    "−": "-",
    "–": "-",
    "·": "-",
    "…": "...",
    "×": "x",
    "÷": "/",
    "±": "+-",
    "≈": "~",
    "µ": "u",
}
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
    "fixable": "36",
    "added": "32",
    "removed": "31",
}

# The styles that `write` allows: bold, dim, italic, underlined and text colours that are readable on any background.
# Not those that hide text, blink or invert colours. rich-argparse uses 36, 208 and 244.
_STYLE = r"(?:[0-4]|3[1-79]|49|9[0-7]|38;5;(?:36|208|244))"
OUR_STYLES = rf"(\x1b\[{_STYLE}(?:;{_STYLE})*m)"
LINES = "\n\t"
ERASED = "\r\x1b[K"  # return to the start of the line and erase it

# Invisible letters and marks: fillers, joiners, and variation selectors except the two that emoji use. A name with one
# of them looks like another name. (Python treats Unicode's format characters as not printable already.)
_UNSEEN = (0x034F, *range(0x115F, 0x1161), *range(0x17B4, 0x17B6), *range(0x180B, 0x1810), 0x3164, 0xFFA0)
INVISIBLE = frozenset(map(chr, (*_UNSEEN, *range(0xFE00, 0xFE0E), *range(0xE0100, 0xE01F0))))


class OutputError(OSError):
    """The output could not be written: a full disk, a closed file. A closed pipe is a BrokenPipeError instead."""

    def __str__(self) -> str:
        return f"cannot write the output: {self.strerror or ': '.join(map(str, self.args))}"


def console(file: TextIO | None = None, *, narrowest: int = NARROWEST) -> Console:
    """Return a rich console that prints plain text: no markup, emoji codes, highlighting or control characters.

    Colour only on a terminal and never with NO_COLOR; at least ``narrowest`` wide, or as wide as the terminal with 0.
    """
    from rich.console import Console
    from rich.segment import Segment

    class CleanConsole(Console):
        """Cleans the text that is drawn; rich adds styles and cursor movements afterwards."""

        def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*args, **options):
                text = encodable(printable_lines(segment.text), self.encoding)
                yield segment if segment.control else Segment(text, segment.style)

    stream = sys.stdout if file is None else file
    width = None if _is_terminal(stream) or "COLUMNS" in os.environ else PIPE_WIDTH
    plain = CleanConsole(
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
    """Return a table without lines: columns two spaces apart, dim headings, no wrapping."""
    from rich.table import Table

    plain = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in headings:
        plain.add_column(heading, no_wrap=True)
    return plain


def print_tables(show: Callable[[Console], None]) -> None:
    """Write what ``show`` prints, without the trailing spaces that rich adds to each line of a table."""
    out = console()
    with output_errors(), out.capture() as captured:  # rich ends a capture with an empty write, which can fail
        show(out)
    _put("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()), sys.stdout)


def wants_colour(stream: TextIO) -> bool:
    """Return whether to use colour: NO_COLOR disables it, FORCE_COLOR enables it, else terminals except dumb ones."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return _is_terminal(stream) and os.environ.get("TERM") != "dumb"


def terminal_width(stream: TextIO, narrowest: int = 60) -> int | None:
    """Return how wide text for a terminal may be, at least ``narrowest``; None for a file or pipe."""
    if not _is_terminal(stream):
        return None
    columns = os.environ.get("COLUMNS", "")
    try:
        wide = int(columns) if columns.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a replacement for stdout may be no file
        return None
    return max(wide, narrowest)


def paint(text: str, style: str, colour: bool) -> str:
    """Return ``text`` in one of STYLES, or unchanged without colour."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if colour and text else text


def printable(text: str, kept: str = "") -> str:
    r"""Return ``text`` in one line, with escapes for characters that move the cursor, or hide or reorder others.

    Messages and file names come from untrusted scripts, and people trust what they read in a log. The control
    characters in ``kept`` stay.

    >>> print(printable("loss\x1b[2Jgone\nnext"))
    loss\x1b[2Jgone\nnext
    """
    plain = text
    for char in kept:
        plain = plain.replace(char, "")
    if plain.isprintable() and (plain.isascii() or INVISIBLE.isdisjoint(plain)):
        return text
    import unicodedata  # slow to import, and rarely needed

    def shown(char: str) -> str:
        # Zs: the no-break and the ideographic space are common in text, although Python treats them as unprintable.
        harmless = char not in INVISIBLE if char.isprintable() else unicodedata.category(char) == "Zs"
        return char if harmless or char in kept else char.encode("unicode_escape").decode("ascii")

    return "".join(map(shown, text))


def shortened(text: str, width: int = 200) -> str:
    """Return ``text`` in one printable line of at most ``width`` characters, for a repr: its middle is left out.

    >>> shortened("<Engine of a very long name>", 20)
    '<Engine o… ong name>'
    """
    text = printable(text)
    if len(text) <= width:
        return text
    begin = (width + 1) // 2 - 1
    return f"{text[:begin]}… {text[len(text) - (width - begin - 2) :]}"


def printable_lines(text: str, *, colour: bool = False) -> str:
    r"""Return a text of several lines made printable: newlines and tabs stay, with ``colour`` also ``paint``'s styles.

    >>> print(printable_lines("loss\x1b[2Jgone\nnext"))
    loss\x1b[2Jgone
    next
    """
    if not colour or "\x1b" not in text:
        return printable(text, LINES)
    import re  # rarely needed

    parts = re.split(OUR_STYLES, text)  # every second part is a style
    return "".join(part if number % 2 else printable(part, LINES) for number, part in enumerate(parts))


def encodable(text: str, encoding: str) -> str:
    r"""Return ``text`` in characters that ``encoding`` has: ampwise's symbols as ASCII, other characters as escapes.

    >>> print(encodable("2⁻¹⁴ → 0 of caf\xe9, 40 × …", "ascii"))
    2^-14 -> 0 of caf\xe9, 40 x ...
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        import re  # rarely needed

        flat = re.sub("[⁻⁰¹²³⁴-⁹]+", lambda raised: f"^{raised[0].translate(RAISED)}", text)
        return flat.encode(encoding, _INSTEAD).decode(encoding)
    return text


def say(template: str, *fields: object, stream: TextIO | None = None) -> None:
    """Write a line, by default to stderr; ``template`` is trusted, the fields need not be."""
    stream = sys.stderr if stream is None else stream
    if stream is not None:  # sys.stderr is None if the shell closed it
        shown = (field if isinstance(field, (int, float)) else printable(str(field)) for field in fields)
        write(f"{template.format(*shown)}\n", stream)


def write(text: str, stream: TextIO) -> None:
    """Write a text with only ampwise's styles, made ``encodable`` for the stream; OutputError if that fails."""
    _put(printable_lines(text, colour=wants_colour(stream)), stream)


def write_exact(data: bytes, stream: TextIO, encoding: str = "utf-8") -> None:
    """Write exact bytes to a file or pipe; on a terminal, write them as clean text."""
    buffer = getattr(stream, "buffer", None)
    if buffer is None or _is_terminal(stream):
        _put(printable_lines(data.decode(encoding, "backslashreplace").replace("\r\n", "\n")), stream)
        return
    with output_errors():
        stream.flush()
        buffer.write(data)
        stream.flush()


def redraw(line: str, stream: TextIO) -> None:
    """Replace the terminal's current line."""
    _put(f"{ERASED}{printable(line)}", stream)
    flush(stream)


def start_line(stream: TextIO) -> None:
    """Go to a new line of a terminal, unless the cursor is at the start of one, as far as that can be known.

    Spaces for a line less one column reach the next line only if the cursor was not at the start.
    """
    if _is_terminal(stream) and os.environ.get("TERM") != "dumb":
        _put(" " * (os.get_terminal_size(stream.fileno()).columns - 1) + ERASED, stream)


@contextmanager
def progress_line(
    first: str, template: str, *, prefix: str = "", quiet: bool = False
) -> Iterator[Callable[[str], None]]:
    """Show the current phase on stderr: in place on a terminal, beginning with ``first``, else one line per phase."""
    if quiet:
        yield lambda phase: None
    elif not sys.stderr.isatty():
        yield lambda phase: say(prefix + template, phase)
    else:
        from rich.text import Text

        with console(sys.stderr).status(first) as status:  # Text: a name is not markup
            yield lambda phase: status.update(Text(printable(template.format(phase))))


def flush(stream: TextIO) -> None:
    """Flush a stream; OutputError if that fails."""
    with output_errors():
        stream.flush()


@contextmanager
def output_errors() -> Iterator[None]:
    """Turn an OSError into OutputError, to tell a full disk from an input file that a command did not find."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(*error.args) from error


def _put(text: str, stream: TextIO) -> None:
    """Write text that is already clean."""
    with output_errors():
        stream.write(encodable(text, getattr(stream, "encoding", None) or "utf-8"))


def _is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal; a replacement for stderr may have no ``isatty``."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty is not None and isatty())


def _instead(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(
        ASCII_REPLACEMENTS.get(char) or char.encode("ascii", "backslashreplace").decode() for char in missing
    ), error.end


_INSTEAD = "ampwise-instead"
codecs.register_error(_INSTEAD, _instead)
