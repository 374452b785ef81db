"""What may reach a terminal, and when it is coloured."""

import ast
import fcntl
import io
import os
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

import ampwise.finding.terminal
from ampwise.finding.terminal import (
    OutputError,
    console,
    encodable,
    flush,
    paint,
    printable,
    printable_lines,
    say,
    start_line,
    table,
    wants_colour,
    write,
    write_exact,
)

from ...for_each import for_each

HOSTILE = "\x1b]0;title\x07\x1b[31m\x9b2J\u202e"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@for_each(
    ("text", "shown"),
    [
        ("plain größer 日本 💥", "plain größer 日本 💥"),
        ("no\u00a0break", "no\u00a0break"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x9b2J", r"\x9b2J"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2028", r"\u2028"),
        ("\udcff", r"\udcff"),
        ("a\x7fb\x08c\x07", r"a\x7fb\x08c\x07"),
        ("\u2066x\u2069\u200e\u200f\u061c", r"\u2066x\u2069\u200e\u200f\u061c"),
        ("zero\u200bwidth\u2060\ufeff\xad", r"zero\u200bwidth\u2060\ufeff\xad"),
        ("tag\U000e0041\U000e007f", r"tag\U000e0041\U000e007f"),
        ("filler\u3164\u115f\uffa0\u034f", r"filler\u3164\u115f\uffa0\u034f"),
        ("selector\ufe00\U000e0100", r"selector\ufe00\U000e0100"),
        ("⚠\ufe0f e\u0301", "⚠\ufe0f e\u0301"),
        ("[red]not markup[/red]", "[red]not markup[/red]"),
    ],
)
def test_printable_shows_what_would_act(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown
    assert printable_lines(f"{text}\n\t{text}").replace("\n", r"\n").replace("\t", r"\t") == rf"{shown}\n\t{shown}"


def test_what_is_filled_in_stays_in_its_line(capsys):
    say("ampwise: {}: {:,} of {}", "a\nampwise: error: b", 1234, OSError("\x1b[2J{}"))
    say("{}", Path("c\rd"), stream=sys.stdout)
    assert capsys.readouterr() == ("c\\rd\n", "ampwise: a\\nampwise: error: b: 1,234 of \\x1b[2J{}\n")


def test_nothing_is_said_where_stderr_was_closed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    say("{}", "nobody listens")


class NoTerminalAtAll:
    """What a program may put in the place of stderr: all that print() asks for is this."""

    text = ""

    def write(self, text):
        self.text += text


def test_a_stream_needs_nothing_but_write(monkeypatch):
    monkeypatch.setattr(sys, "stderr", NoTerminalAtAll())
    say("{}", "\x1b[1m")
    assert sys.stderr.text == "\\x1b[1m\n"


@pytest.mark.parametrize(
    "act", ["\x1b[2J", "\x1b[8m", "\x1b[7m", "\x1b[30;40m", "\x1b[38;5;16m", "\x1b]0;x\x07", "\x1b[;m"]
)
def test_of_what_acts_only_our_own_styles_are_written(monkeypatch, act):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    write(f"{paint('a', 'error', True)}\n\t{act}", stream)
    assert stream.getvalue() == f"\x1b[1;31ma\x1b[0m\n\t{printable(act)}"


def test_without_colour_no_style_is_written():
    stream = io.StringIO()
    write(paint("a", "error", True), stream)
    assert stream.getvalue() == r"\x1b[1;31ma\x1b[0m"


def test_all_our_styles_are_written(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for style in ampwise.finding.terminal.STYLES:
        stream = Terminal()
        write(paint("a", style, True), stream)
        assert stream.getvalue() == paint("a", style, True)


def test_exact_bytes_for_a_file_and_harmless_text_for_a_terminal(monkeypatch):
    data = b"a\r\n\x1b[2J\r\xff\n"
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_exact(data, file)
    assert file.buffer.getvalue() == data
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    write_exact(data, terminal)
    flush(terminal)
    assert terminal.buffer.getvalue() == rb"a" + b"\n" + rb"\x1b[2J\r\xff" + b"\n"


def test_the_console_shows_what_would_act(monkeypatch):
    """Whoever forgets ``printable`` there has crooked columns, and no more."""
    from rich.progress import Progress
    from rich.text import Text

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    screen = console(stream)
    for each in (HOSTILE, Text(HOSTILE)):
        screen.print(each)
    cells = table("name")
    cells.add_row(HOSTILE)
    screen.print(cells)
    with Progress(console=screen) as bar:
        bar.add_task(HOSTILE)
    with screen.status(Text(HOSTILE)):
        pass
    assert r"\x1b]0;title" in stream.getvalue()  # rich itself drops a bell
    acting = re.sub(r"\x1b\[([0-9;]*[mK]|\?25[lh]|\d*A)|\r|\n", "", stream.getvalue())
    assert printable(acting) == acting
    assert "\x1b[31m" not in stream.getvalue()


@pytest.mark.parametrize(
    ("environment", "stream", "expected"),
    [
        ({}, Terminal(), True),
        ({}, io.StringIO(), False),
        ({"NO_COLOR": "1"}, Terminal(), False),
        ({"NO_COLOR": ""}, Terminal(), True),  # https://no-color.org: an empty one says nothing
        ({"FORCE_COLOR": "1"}, io.StringIO(), True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, Terminal(), False),
        ({"TERM": "dumb"}, Terminal(), False),
    ],
)
def test_colour(monkeypatch, environment, stream, expected):
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(stream) is expected


def test_paint_leaves_text_alone_without_colour():
    assert paint("x", "error", False) == "x"
    assert paint("", "error", True) == ""
    assert paint("x", "error", True) == "\x1b[1;31mx\x1b[0m"


def test_the_console_is_plain_and_wide_in_a_pipe(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    stream = io.StringIO()
    console(stream).print("[bold]x[/bold] 123 :warning:", style="bold")
    assert stream.getvalue() == "[bold]x[/bold] 123 :warning:\n"  # a name is no markup, and no emoji
    assert console(stream).width == 110


@pytest.mark.parametrize(("columns", "width"), [("1", 80), ("79", 80), ("80", 80), ("200", 200)])
def test_the_console_is_never_too_narrow_for_a_table(monkeypatch, columns, width):
    """A terminal that wraps a number shows all of it; a table squeezed into 40 columns does not."""
    monkeypatch.setenv("COLUMNS", columns)
    assert console(Terminal()).width == console(io.StringIO()).width == width


class Full(io.StringIO):
    def write(self, *_):
        raise OSError(28, "No space left on device")

    flush = write


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_what_cannot_be_written_is_distinguished_from_other_errors():
    for act in (lambda: write("x", Full()), lambda: flush(Full())):
        with pytest.raises(OutputError, match=r"^cannot write the output: No space left on device$"):
            act()
    with pytest.raises(BrokenPipeError):
        write("x", Broken())


def test_the_console_honours_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    coloured, plain = Terminal(), Terminal()
    console(coloured).print("x", style="bold red")
    monkeypatch.setenv("NO_COLOR", "1")
    console(plain).print("x", style="bold red")
    assert "\x1b[" in coloured.getvalue()
    assert plain.getvalue() == "x\n"


@for_each(
    ("encoding", "shown"),
    [
        ("ascii", "loss 2 -> 1, -12%, ~3 x 2^-14 ... 10^5 - 30 us / -"),
        ("latin-1", "loss 2 -> 1, -12%, ~3 × 2^-14 ... 10^5 · 30 µs ÷ -"),
        ("utf-8", "loss 2 → 1, −12%, ≈3 × 2⁻¹⁴ … 10⁵ · 30 µs ÷ –"),
    ],
)
def test_our_own_signs_where_the_stream_has_none(encoding, shown):
    text = "loss 2 → 1, −12%, ≈3 × 2⁻¹⁴ … 10⁵ · 30 µs ÷ –"
    assert encodable(text, encoding) == shown
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    write(text, stream)
    flush(stream)
    assert stream.buffer.getvalue().decode(encoding) == shown


def test_what_is_not_ours_stays_to_be_distinguished():
    assert encodable("größe 日\udcff", "ascii") == r"gr\xf6\xdfe \u65e5\udcff"


def test_every_sign_that_is_written_has_another_in_ascii():
    """No report shows an escape in place of a character that we chose."""
    folder = Path(ampwise.finding.terminal.__file__).parent.parent
    files = [file for part in ("finding", "report", "cli", "rules") for file in (folder / part).rglob("*.py")]
    texts = [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    signs = sorted({char for text in texts for char in text if ord(char) > 127} - {"\N{BRAILLE PATTERN DOTS-12345678}"})
    assert signs
    assert encodable("".join(signs), "ascii").count("\\") == 0


def test_a_line_starts_where_the_cursor_is_or_below():
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        start_line(stream)
        stream.flush()
        # From the start of a line, 39 spaces stay on it; from anywhere else, they end on the next one.
        assert os.read(ours, 1000) == b" " * 39 + b"\r\x1b[K"
    os.close(ours)
    pipe = io.StringIO()
    start_line(pipe)
    assert pipe.getvalue() == ""
