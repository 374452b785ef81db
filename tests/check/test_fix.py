"""Mending: all edits of a finding or none, nothing outside them, and never a file that does not parse."""

import ast
import difflib
import json
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampwise.check.apply_edits import apply_fixes, unified_diff
from ampwise.check.source.script import script_from_bytes, script_from_text
from ampwise.finding import Edit, Place, Rule, Severity

RULE = Rule(
    code="AMP101",
    name="clip-scaled-grads",
    severity=Severity.ERROR,
    summary="s",
    why="w",
    fix="f",
    bad="b",
    good="g",
    fixable="sometimes",
)


def find(*edits, safe=True, message="m", line=1):
    first = edits[0] if edits else Edit(line, 1, line, 1, "")
    return RULE.at(Place(file="a.py", line=first.line, cell=first.cell), message, edits=edits, safe=safe)


def script(text, path="a.py"):
    return script_from_text(text, path)


def mended(text, *findings, unsafe=False):
    return apply_fixes(script(text), findings, unsafe=unsafe)


def test_all_edits_of_a_finding_are_made():
    result = mended("a\nb\n", find(Edit(1, 1, 1, 2, "x"), Edit(2, 2, 2, 2, " + 1")))
    assert (result.text, len(result.fixed), result.left, result.refused) == ("x\nb + 1\n", 1, (), None)


def test_unsafe_edits_need_consent():
    finding = find(Edit(1, 1, 1, 2, "x"), safe=False)
    assert mended("a\n", finding).text == "a\n"
    assert mended("a\n", finding).left == (finding,)
    assert mended("a\n", finding, unsafe=True).text == "x\n"


def test_a_finding_in_the_way_of_an_earlier_one_is_left_whole():
    first, second = find(Edit(1, 1, 1, 4, "x")), find(Edit(1, 3, 1, 5, "y"), Edit(2, 1, 2, 2, "z"))
    result = mended("abcd\nb\n", second, first)
    assert (result.text, result.fixed, result.left) == ("xd\nb\n", (first,), (second,))


def test_an_import_two_findings_ask_for_is_added_once_and_counts_for_both():
    line = Edit(1, 1, 1, 1, "import torch\n")
    findings = [find(line, Edit(1, 1, 1, 2, "x")), find(line, Edit(2, 1, 2, 2, "y"))]
    result = mended("a\nb\n", *findings)
    assert result.text == "import torch\nx\ny\n"
    assert len(result.fixed) == 2


def test_the_same_change_for_two_findings_is_made_once():
    findings = [find(Edit(1, 1, 1, 2, "x"), message="one"), find(Edit(1, 1, 1, 2, "x"), message="two")]
    result = mended("a\n", *findings)
    assert (result.text, len(result.fixed)) == ("x\n", 2)


def test_a_bracket_of_one_is_not_the_bracket_of_another():
    """`f(` and `g(` around spans that end at one spot: which is the outer one is for the next pass to say."""
    inner = find(Edit(1, 5, 1, 5, "f("), Edit(1, 6, 1, 6, ")"))
    outer = find(Edit(1, 1, 1, 1, "g("), Edit(1, 6, 1, 6, ")"))
    result = mended("a + b\n", inner, outer)
    assert (result.text, result.left) == ("g(a + b)\n", (inner,))


def test_lines_inserted_at_one_spot_keep_the_order_of_the_findings():
    findings = [find(Edit(2, 1, 2, 1, f"{name}()\n"), message=name) for name in ("first", "second")]
    assert mended("a\nb\n", *findings).text == "a\nfirst()\nsecond()\nb\n"
    # A script inserts before a statement with the margin behind the line.
    indented = [find(Edit(2, 5, 2, 5, f"{name}()\n    ")) for name in ("first", "second")]
    assert mended("if a:\n    b\n", *indented).text == "if a:\n    first()\n    second()\n    b\n"


def test_words_inserted_at_one_spot_wait_for_the_next_pass():
    findings = [find(Edit(1, 5, 1, 5, "not "), message="one"), find(Edit(1, 5, 1, 5, "await_("), message="two")]
    result = mended("a = b\n", *findings)
    assert (result.text, result.left) == ("a = not b\n", (findings[1],))


def test_findings_without_edits_are_left():
    finding = find(line=2)
    source = script("a\nb\n")
    result = apply_fixes(source, [finding], unsafe=True)
    assert result.script is source
    assert (result.fixed, result.left, result.refused) == ((), (finding,), None)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (Edit(1, 1, 1, 2, "("), "syntax error at line 1: '(' was never closed"),
        (Edit(9, 1, 9, 1, "x"), "the edit at 9:1 is outside the text"),
        (Edit(1, 1, 1, 2, "'\r'"), "the written file would be read back differently"),
    ],
)
def test_edits_that_corrupt_the_file_are_refused(edit, reason):
    good, bad = find(Edit(2, 1, 2, 2, "fine")), find(edit)
    result = mended("a\nb\n", good, bad)
    assert (result.text, result.fixed, len(result.left)) == ("a\nb\n", (), 2)
    if "\r" not in edit.content:
        assert result.refused == f"fixing AMP101 would break the file, so nothing was changed: {reason}"
    assert result.refused.startswith("fixing AMP101 would break the file")


def test_what_the_encoding_has_no_bytes_for_is_refused():
    source = script_from_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"), "a.py")
    result = apply_fixes(source, [find(Edit(2, 1, 2, 2, "π"))], unsafe=False)
    assert result.text == source.text
    assert "latin-1" in result.refused or "iso-8859-1" in result.refused


def test_encoding_mark_and_line_endings_survive():
    data = b"\xef\xbb\xbfa = 1\r\nb = 2\r\n"
    result = apply_fixes(script_from_bytes(data, "a.py"), [find(Edit(2, 1, 2, 1, "c = 3\n"))], unsafe=False)
    after = result.script
    assert after.file_bytes(after.file_text(after.text)) == b"\xef\xbb\xbfa = 1\r\nc = 3\r\nb = 2\r\n"


# Notebooks.

NOTEBOOK = json.dumps(
    {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": ["Words"]},
            {"cell_type": "code", "metadata": {}, "outputs": [], "source": ["%pip install torch\n", "a = 1"]},
            {"cell_type": "code", "metadata": {}, "outputs": [], "source": ["b = a\n", "c = b"]},
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    },
    indent=1,
)


def cells(result):
    return ["".join(cell["source"]) for cell in json.loads(result.script.file_text(result.text))["cells"]]


def test_edits_of_a_notebook_stay_in_their_cells():
    edits = [Edit(2, 6, 2, 6, "\nd = 2", cell=2), Edit(1, 1, 1, 2, "x", cell=3), Edit(2, 5, 2, 6, "x", cell=3)]
    result = apply_fixes(script(NOTEBOOK, "a.ipynb"), [find(*edits)], unsafe=False)
    assert cells(result) == ["Words", "%pip install torch\na = 1\nd = 2", "x = a\nc = x"]
    assert unified_diff(script(NOTEBOOK, "a.ipynb"), result.text) == (
        "--- a.ipynb:cell 2\n+++ a.ipynb:cell 2\n@@ -1,2 +1,3 @@\n"
        " %pip install torch\n a = 1\n+d = 2\n"
        "--- a.ipynb:cell 3\n+++ a.ipynb:cell 3\n@@ -1,2 +1,2 @@\n"
        "-b = a\n-c = b\n+x = a\n+c = x\n"
    )


def test_a_cell_that_would_not_parse_is_refused():
    result = apply_fixes(script(NOTEBOOK, "a.ipynb"), [find(Edit(1, 1, 1, 2, "(", cell=3))], unsafe=False)
    assert result.refused is not None
    assert result.text == script(NOTEBOOK, "a.ipynb").text


# Differences.


def test_a_diff_is_what_ruff_prints():
    before = "import os\nx = 1\n\x0c\ny = 2\nz = 3\nlast = 4"
    assert unified_diff(script(before), before.replace("x = 1\n", "")) == (
        "--- a.py\n+++ a.py\n@@ -1,5 +1,4 @@\n import os\n-x = 1\n \x0c\n y = 2\n z = 3\n"
    )
    assert unified_diff(script(before), before + "\n").endswith("-last = 4\n\\ No newline at end of file\n+last = 4\n")
    assert unified_diff(script(before), before) == ""


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_patch_takes_the_diff_of_any_file(tmp_path, mark, ends):
    before = f"{mark}first = 1\nsecond = 2\nthird = 3\n".replace("\n", ends).encode()
    (tmp_path / "a.py").write_bytes(before)
    old = script_from_bytes(before, "a.py")
    difference = unified_diff(old, old.text.replace("2", "22")).encode()
    done = subprocess.run(
        ["patch", "-p0", "--binary"], cwd=tmp_path, input=difference, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "a.py").read_bytes() == before.replace(b"2", b"22")


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
@pytest.mark.parametrize(
    "name", ["größe.py", "a b.py", 'q"\\.py', "tab\t.py", "\x1b[2J.py", "a\n+++ b.py", "\udcff.py"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_patch_finds_the_file_whatever_its_name(tmp_path, name, encoding):
    """A newline in a name would otherwise begin a patch of another file."""
    before = f"# coding: {encoding}\nx = 2  # é\n".encode(encoding)
    (tmp_path / name).write_bytes(before)
    old = script_from_bytes(before, name)
    difference = unified_diff(old, old.text.replace("2", "22")).encode(encoding)
    done = subprocess.run(
        ["patch", "-p0", "--binary"], cwd=tmp_path, input=difference, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {name: before.replace(b"2 ", b"22 ")}


codes = st.lists(st.sampled_from(["a = 1", "b = 2", "", "c = 'ü'", "\x0c"]), max_size=12).map("\n".join)


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch here")
@settings(max_examples=30, deadline=None)
@given(before=codes, after=codes)
def test_patch_makes_of_the_old_text_the_new(tmp_path_factory, before, after):
    folder = tmp_path_factory.mktemp("patch")
    (folder / "a.py").write_bytes(before.encode())
    difference = unified_diff(script(before), after)
    if difference and before and after:  # patch removes a file that becomes empty
        done = subprocess.run(
            ["patch", "-p0", "--quiet"], cwd=folder, input=difference.encode(), capture_output=True, check=False
        )
        assert done.returncode == 0, done
        assert (folder / "a.py").read_bytes() == after.encode()
    else:
        assert before == after or not (before and after)


# Laws.


@st.composite
def scripts_with_findings(draw):
    """Assignments, one a line, and findings that each replace or follow a few of them."""
    count = draw(st.integers(1, 8))
    text = "".join(f"x{number} = {number}\n" for number in range(count))
    changes = st.builds(
        lambda line, kind, number: {
            "replace": Edit(line, 1, line, 3, f"y{number}"),
            "insert": Edit(line, 1, line, 1, f"new({number})\n"),
            "delete": Edit(line, 1, line + 1, 1, ""),
        }[kind],
        st.integers(1, count),
        st.sampled_from(["replace", "insert", "delete"]),
        st.integers(0, 2),
    )
    groups = draw(st.lists(st.lists(changes, min_size=1, max_size=3, unique_by=lambda edit: edit.line), max_size=6))
    return text, [find(*group, message=str(number)) for number, group in enumerate(groups)]


@given(scripts_with_findings())
def test_every_finding_is_fixed_or_left_and_none_is_half_made(case):
    text, findings = case
    result = mended(text, *findings)
    assert result.refused is None
    assert sorted(result.fixed + result.left, key=id) == sorted(findings, key=id)
    ast.parse(result.text)
    made = {edit for finding in result.fixed for edit in finding.edits}
    for finding in result.left:
        # Something of it is in the way; and nothing of it was made for its own sake.
        assert any(one.overlaps(other) for one in finding.edits for other in made)


@given(scripts_with_findings())
def test_what_was_fixed_is_the_edits_from_the_end_one_by_one(case):
    text, findings = case
    result = mended(text, *findings)
    made = list(dict.fromkeys(edit for finding in result.fixed for edit in finding.edits))
    lines = text.split("\n")
    for edit in sorted(made, key=lambda edit: (edit.start, edit.end), reverse=True):
        same_spot = [other for other in made if (other.start, other.end) == (edit.start, edit.end)]
        if edit is same_spot[0]:  # those at one spot, in their order
            content = "".join(other.content for other in same_spot)
            if edit.line == edit.end_line:
                line = lines[edit.line - 1]
                lines[edit.line - 1] = line[: edit.column - 1] + content + line[edit.end_column - 1 :]
            else:
                del lines[edit.line - 1]
    assert result.text == "\n".join(lines)


@given(scripts_with_findings())
def test_lines_without_an_edit_are_untouched(case):
    text, findings = case
    touched = {edit.line for finding in findings for edit in finding.edits}
    kept = [line for number, line in enumerate(text.split("\n")[:-1], 1) if number not in touched]
    after = mended(text, *findings).text.split("\n")
    matched = difflib.SequenceMatcher(None, kept, after, autojunk=False).get_matching_blocks()
    assert sum(block.size for block in matched) == len(kept)


@given(scripts_with_findings())
def test_a_pass_fixes_at_least_one_finding_if_there_is_one(case):
    """So that passes come to an end."""
    text, findings = case
    assert bool(mended(text, *findings).fixed) is bool(findings)
    assert mended(text).text == text
