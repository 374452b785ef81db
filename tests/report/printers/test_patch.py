"""Edits as lines taken away and added."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding import Edit, edited
from ampwise.report.printers.edit_preview import preview_edits
from ampwise.report.source_lines import SourceFiles

SCRIPT = (
    "import torch\nscaler = GradScaler()\nloss.backward()\nclip()\nstep()\nupdate()\nzero()\nsave()\nlog()\nend()\n"
)


@pytest.fixture
def show(finding):
    def show(*edits, text=SCRIPT, file="train.py", **more):
        cell = edits[0].cell if edits else None
        return preview_edits(finding(file=file, line=1, cell=cell, edits=edits, **more), SourceFiles({file: text}))

    return show


def test_an_insertion_shows_only_what_is_new(show):
    assert show(Edit(4, 1, 4, 1, "unscale()\n")) == [
        "  |",
        "3 | loss.backward()",
        "4 + unscale()",
        "5 | clip()",
        "  |",
    ]


def test_a_line_that_is_changed_goes_and_comes(show):
    assert show(Edit(1, 8, 1, 13, "numpy")) == [
        "  |",
        "  - import torch",
        "1 + import numpy",
        "2 | scaler = GradScaler()",
        "  |",
    ]


def test_a_line_that_goes_has_no_number(show):
    assert show(Edit(2, 1, 3, 1, "")) == [
        "  |",
        "1 | import torch",
        "  - scaler = GradScaler()",
        "2 | loss.backward()",
        "  |",
    ]


def test_edits_far_apart_are_numbered_as_they_will_be(show):
    assert show(Edit(1, 1, 1, 1, "# one\n# two\n"), Edit(9, 1, 9, 4, "print")) == [
        "   |",
        " 1 + # one",
        " 2 + # two",
        " 3 | import torch",
        "...",
        "10 | save()",
        "   - log()",
        "11 + print()",
        "12 | end()",
        "   |",
    ]


def test_edits_close_by_are_one_change(show):
    lines = show(Edit(3, 1, 3, 5, "total"), Edit(4, 1, 4, 5, "clamp"))
    assert lines[2:6] == ["  - loss.backward()", "  - clip()", "3 + total.backward()", "4 + clamp()"]


def test_a_line_after_the_last(show):
    assert show(Edit(2, 1, 2, 1, "b\n"), text="a\n") == ["  |", "1 | a", "2 + b", "  |"]
    assert show(Edit(1, 2, 1, 2, "\nb"), text="a") == ["  |", "1 | a", "2 + b", "  |"]


def test_edits_that_need_consent_say_so(show):
    assert show(Edit(4, 1, 4, 5, "x"), safe=False)[0] == "note: applied only with `--unsafe-fixes`"


def test_cells_have_their_names_and_their_own_numbers(show):
    notebook = json.dumps({"cells": [{"source": "a = 1"}, {"source": ["b = 2\n", "c = 3"]}]})
    edits = [Edit(1, 1, 1, 1, "import torch\n", cell=1), Edit(2, 1, 2, 2, "d", cell=2)]
    assert show(*edits, text=notebook, file="train.ipynb") == [
        " ::: cell 1",
        "  |",
        "1 + import torch",
        "2 | a = 1",
        "  |",
        " ::: cell 2",
        "  |",
        "1 | b = 2",
        "  - c = 3",
        "2 + d = 3",
        "  |",
    ]


@pytest.mark.parametrize("edit", [Edit(99, 1, 99, 1, "x"), Edit(1, 99, 1, 99, "x"), Edit(11, 2, 11, 2, "x")])
def test_a_text_that_is_not_the_one_the_edits_are_for_shows_nothing(show, edit):
    assert show(edit) == []


def test_no_edits_or_no_text_show_nothing(show, finding):
    assert show() == []
    assert preview_edits(finding(file="gone.py", line=1, edits=[Edit(1, 1, 1, 1, "x")]), SourceFiles()) == []


lines = st.lists(st.sampled_from(["a", "bb", "", "c d"]), min_size=1, max_size=30)


@st.composite
def cases(draw):
    text = "".join(f"{line}\n" for line in draw(lines))
    count = text.count("\n")
    numbers = sorted(draw(st.sets(st.integers(1, count), min_size=1, max_size=4)))
    contents = st.sampled_from(["", "x", "new\n", "\nnew", "x\ny"])
    ends = [
        min(draw(st.integers(number, number + 2)), stop)
        for number, stop in zip(numbers, [*numbers[1:], count], strict=True)
    ]
    return text, [Edit(start, 1, end, 1, draw(contents)) for start, end in zip(numbers, ends, strict=True)]


@given(cases())
def test_every_numbered_line_is_that_line_of_the_edited_text(finding, case):
    """And what is taken away and added is, line for line, the difference in length."""
    text, edits = case
    after = edited(text, edits).split("\n")
    shown = preview_edits(finding(file="a.py", line=1, edits=edits), SourceFiles({"a.py": text}))
    rows = [match for line in shown if (match := re.fullmatch(r" *(\d*) ([-+|])(?: (.*))?", line))]
    for number, mark, code in (match.groups() for match in rows):
        if mark == "-":
            assert not number
            assert (code or "") in text.split("\n")
        elif number:
            assert after[int(number) - 1] == (code or "")
    marks = [match[2] for match in rows]
    assert marks.count("+") - marks.count("-") == len(after) - len(text.split("\n"))
