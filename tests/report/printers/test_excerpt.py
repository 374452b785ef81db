"""The source around a place: carets under the right characters, silence where there is no source."""

import json
import os

import pytest

from ampwise.finding import Place
from ampwise.report.source_lines import SourceFiles, excerpt

SCRIPT = "import torch\nscaler = GradScaler()\nloss.backward()\n\tstep(x)\nend()\nlast()\n"


@pytest.fixture
def show(tmp_path):
    def show(text, encoding="utf-8", **place):
        file = tmp_path / "train.py"
        file.write_bytes(text.encode(encoding))
        return excerpt(Place(file=str(file), **place), SourceFiles())

    return show


def test_two_lines_of_context_and_carets_under_the_span(show):
    assert show(SCRIPT, line=3, column=6, end_line=3, end_column=14) == [
        "  |",
        "1 | import torch",
        "2 | scaler = GradScaler()",
        "3 | loss.backward()",
        "  |      ^^^^^^^^",
        "4 |     step(x)",
        "5 | end()",
        "  |",
    ]


def test_a_column_without_an_end_is_one_caret(show):
    assert show(SCRIPT, line=1, column=8)[1:3] == ["1 | import torch", "  |        ^"]


def test_a_line_without_a_column_has_no_caret(show):
    assert not any("^" in line for line in show(SCRIPT, line=2))


def test_tabs_and_wide_characters_keep_carets_aligned(show):
    assert show("\tx = 1\n", line=1, column=2)[2] == "  |     ^"
    assert show("名前 = nan\n", line=1, column=6, end_line=1, end_column=9)[2] == "  |        ^^^"


def test_escapes_in_source_are_shown_and_keep_carets_aligned(show):
    lines = show("'\x1b' + x\n", line=1, column=7)
    assert lines[1:3] == [r"1 | '\x1b' + x", "  |          ^"]


def test_a_span_over_lines_is_underlined_on_its_first(show):
    assert show("f(\n  1,\n)\n", line=1, column=1, end_line=3, end_column=2)[1:3] == ["1 | f(", "  | ^^"]


def test_the_gutter_is_as_wide_as_the_last_number(show):
    lines = show("x\n" * 12, line=9, column=1)
    assert lines[:2] == ["   |", " 7 | x"]
    assert lines[-2] == "11 | x"


def test_a_huge_line_is_cut_around_the_spot(show):
    lines = show("a" * 5000 + "b" + "c" * 5000 + "\n", line=1, column=5001)
    assert len(lines[1]) < 200
    assert lines[1][lines[2].index("^")] == "b"


@pytest.mark.parametrize("column", [99, 100000])
def test_a_column_past_the_end_is_marked_at_the_end(show, column):
    assert show("ab\n", line=1, column=column)[2] == "  |   ^"


def test_a_declared_encoding_is_honoured(show):
    assert show("# coding: latin-1\nx = 'é'\n", encoding="latin-1", line=2)[2] == "2 | x = 'é'"


def test_form_feeds_and_bare_returns_do_not_shift_lines(show):
    assert show("a\n\x0c\nb\u2028c\r\nd\n", line=4)[-2] == "4 | d"


def test_the_last_line_and_the_line_after_it(show):
    assert show("a\nb\n", line=2)[-2] == "2 | b"
    assert show("a\nb", line=2)[-2] == "2 | b"
    assert show("a\nb\n", line=3) == []


@pytest.mark.parametrize("content", [b"\xff\xfe\x00x", b"# coding: nonsense\nx\n", b""])
def test_what_is_not_source_has_no_excerpt(tmp_path, content):
    file = tmp_path / "data.bin"
    file.write_bytes(content)
    assert excerpt(Place(file=str(file), line=1), SourceFiles()) == []


@pytest.mark.parametrize("name", ["gone.py", "a\0b.py", "x" * 5000, "."])
def test_what_is_not_a_file_has_no_excerpt(name):
    assert excerpt(Place(file=name, line=1), SourceFiles()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    assert excerpt(Place(file=str(tmp_path / "pipe.py"), line=1), SourceFiles()) == []


def test_no_file_or_no_line_is_no_excerpt(show):
    assert excerpt(Place(parameter="weight"), SourceFiles()) == []
    assert show(SCRIPT) == []


NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": "# Training"},
        {"cell_type": "code", "source": ["import torch\n", "loss.backward()"]},
        {"cell_type": "code", "source": "a = 1\r\nb = 2"},
    ]
}


def test_a_cell_has_its_own_lines(tmp_path):
    file = tmp_path / "train.ipynb"
    file.write_text(json.dumps(NOTEBOOK))
    sources = SourceFiles()
    assert excerpt(Place(file=str(file), cell=2, line=2, column=6), sources) == [
        "  |",
        "1 | import torch",
        "2 | loss.backward()",
        "  |      ^",
        "  |",
    ]
    assert excerpt(Place(file=str(file), cell=3, line=2), sources)[2] == "2 | b = 2"
    assert excerpt(Place(file=str(file), cell=4, line=1), sources) == []
    assert excerpt(Place(file=str(file), line=1), sources) == [], "the lines of the JSON are nobody's"


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": 3}', '{"cells": [{"source": [1]}]}', "[" * 100000])
def test_a_broken_notebook_has_no_excerpt(text):
    assert excerpt(Place(file="a.ipynb", cell=1, line=1), SourceFiles({"a.ipynb": text})) == []


def test_a_text_that_is_given_goes_before_the_file(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("on disk\n")
    sources = SourceFiles({str(file): "from stdin\r\n", "-": "no file"})
    assert excerpt(Place(file=str(file), line=1), sources)[1] == "1 | from stdin"
    assert excerpt(Place(file="-", line=1), sources)[1] == "1 | no file"
