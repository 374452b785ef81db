"""The line of a place: carets under the right characters, silence where there is no source."""

import json
import os

import pytest

from ampwise.finding import Place
from ampwise.report.source_lines import SourceFiles, excerpt

from ...for_each import for_each

SCRIPT = "import torch\nscaler = GradScaler()\nloss.backward()\n\tstep(x)\nend()\nlast()\n"


@pytest.fixture
def show(tmp_path):
    def show(text, encoding="utf-8", **place):
        file = tmp_path / "train.py"
        file.write_bytes(text.encode(encoding))
        return excerpt(Place(file=str(file), **place), SourceFiles())

    return show


def test_the_line_without_its_indentation_and_carets_under_the_span(show):
    assert show(SCRIPT, line=3, column=6, end_line=3, end_column=14) == ["  3 | loss.backward()", "    |      ^^^^^^^^"]
    assert show(SCRIPT, line=4, column=7, end_line=4, end_column=8) == ["  4 | step(x)", "    |      ^"]


def test_of_a_call_that_is_the_whole_line_the_name_is_marked(show):
    text = "\tscaler.scale(loss).backward()\nsave({\n  1: 2})\nloss = f(x)\n"
    assert show(text, line=1, column=2, end_line=1, end_column=31)[1] == "    | ^^^^^^^^^^^^^^^^^^^^^^^^^^^"
    assert show(text, line=2, column=1, end_line=3, end_column=9) == ["  2 | save({", "    | ^^^^"]
    assert show(text, line=4, column=1, end_line=4, end_column=12)[1] == "    | ^^^^^^^^^^^", "not a call"


def test_a_column_without_an_end_is_one_caret(show):
    assert show(SCRIPT, line=1, column=8) == ["  1 | import torch", "    |        ^"]


def test_a_line_without_a_column_has_no_caret(show):
    assert show(SCRIPT, line=2) == ["  2 | scaler = GradScaler()"]


def test_wide_characters_keep_carets_aligned(show):
    assert show("名前 = nan\n", line=1, column=6, end_line=1, end_column=9)[1] == "    |        ^^^"


def test_escapes_in_source_are_shown_and_keep_carets_aligned(show):
    assert show("'\x1b' + x\n", line=1, column=7) == [r"  1 | '\x1b' + x", "    |          ^"]


def test_the_gutter_is_as_wide_as_the_number(show):
    assert show("x\n" * 120, line=100, column=1) == ["  100 | x", "      | ^"]


def test_a_huge_line_is_cut_around_the_spot(show):
    lines = show("a" * 5000 + "b" + "c" * 5000 + "\n", line=1, column=5001)
    assert len(lines[0]) < 200
    assert lines[0][lines[1].index("^")] == "b"


@pytest.mark.parametrize("column", [99, 100000])
def test_a_column_past_the_end_is_marked_at_the_end(show, column):
    assert show("ab\n", line=1, column=column)[1] == "    |   ^"


def test_a_declared_encoding_is_honoured(show):
    assert show("# coding: latin-1\nx = 'é'\n", encoding="latin-1", line=2) == ["  2 | x = 'é'"]


def test_form_feeds_and_bare_returns_do_not_shift_lines(show):
    assert show("a\n\x0c\nb\u2028c\r\nd\n", line=4) == ["  4 | d"]


def test_the_last_line_and_the_line_after_it(show):
    assert show("a\nb\n", line=2) == ["  2 | b"]
    assert show("a\nb", line=2) == ["  2 | b"]
    assert show("a\nb\n", line=3) == []


@pytest.mark.parametrize("content", [b"\xff\xfe\x00x", b"# coding: nonsense\nx\n", b""])
def test_what_is_not_source_has_no_excerpt(tmp_path, content):
    file = tmp_path / "data.bin"
    file.write_bytes(content)
    assert excerpt(Place(file=str(file), line=1), SourceFiles()) == []


@for_each("name", ["gone.py", "a\0b.py", "x" * 5000, "."])
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
        "  2 | loss.backward()",
        "    |      ^",
    ]
    assert excerpt(Place(file=str(file), cell=3, line=2), sources) == ["  2 | b = 2"]
    assert excerpt(Place(file=str(file), cell=4, line=1), sources) == []
    assert excerpt(Place(file=str(file), line=1), sources) == [], "the lines of the JSON are nobody's"


@for_each("text", ["{", "[]", '{"cells": 3}', '{"cells": [{"source": [1]}]}', "[" * 100000])
def test_a_broken_notebook_has_no_excerpt(text):
    assert excerpt(Place(file="a.ipynb", cell=1, line=1), SourceFiles({"a.ipynb": text})) == []


def test_a_text_that_is_given_goes_before_the_file(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("on disk\n")
    sources = SourceFiles({str(file): "from stdin\r\n", "-": "no file"})
    assert excerpt(Place(file=str(file), line=1), sources) == ["  1 | from stdin"]
    assert excerpt(Place(file="-", line=1), sources) == ["  1 | no file"]
