"""What may reach a terminal, and when it is coloured."""

import ast
import io
from pathlib import Path

import pytest

import ampwise.printers.terminal
from ampwise.printers.terminal import CannotWrite, console, encodable, flush, paint, printable, wants_colour, write


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
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
        ("[red]not markup[/red]", "[red]not markup[/red]"),
    ],
)
def test_printable_shows_what_would_act(text, shown):
    assert printable(text) == shown


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
    console(stream).print("[bold]x[/bold] 123")
    assert stream.getvalue() == "x 123\n"
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


def test_what_cannot_be_written_is_told_from_other_errors():
    for act in (lambda: write("x", Full()), lambda: flush(Full())):
        with pytest.raises(CannotWrite, match=r"^cannot write the output: No space left on device$"):
            act()
    with pytest.raises(BrokenPipeError):
        write("x", Broken())


def test_the_console_honours_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    coloured, plain = Terminal(), Terminal()
    console(coloured).print("[bold red]x[/]")
    monkeypatch.setenv("NO_COLOR", "1")
    console(plain).print("[bold red]x[/]")
    assert "\x1b[" in coloured.getvalue()
    assert plain.getvalue() == "x\n"


@pytest.mark.parametrize(
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


def test_what_is_not_ours_stays_to_be_told_apart():
    assert encodable("größe 日\udcff", "ascii") == r"gr\xf6\xdfe \u65e5\udcff"


def test_every_sign_that_is_written_has_another_in_ascii():
    """No report shows an escape in place of a character that we chose."""
    folder = Path(ampwise.printers.terminal.__file__).parent.parent
    files = [file for part in ("report", "live", "printers", "cli", "rules") for file in (folder / part).rglob("*.py")]
    texts = [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and file.stem != "spark"
    ]
    signs = sorted({char for text in texts for char in text if ord(char) > 127} - {"\N{BRAILLE PATTERN DOTS-12345678}"})
    assert signs
    assert encodable("".join(signs), "ascii").count("\\") == 0
