"""A file read: what it holds, where its parts are, and how it is written back."""

import ast
import bisect
import os
import pickle
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check.source.script import (
    UnreadableFile,
    read_script,
    script_from_bytes,
    script_from_text,
    with_newlines_of,
)
from ampwise.finding import edited

from ...night import NIGHTLY


def unreadable(data, path="a.py"):
    with pytest.raises(UnreadableFile) as caught:
        script_from_bytes(data, path)
    return caught.value


def apply(script, *edits):
    return edited(script.text, edits)


def first(script, kind):
    return next(node for node in ast.walk(script.tree) if isinstance(node, kind))


# Encodings and line endings.


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("é = 1\n".encode(), "é = 1\n"),
        (b"\xef\xbb\xbf" + "é = 1\n".encode(), "é = 1\n"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", "# -*- coding: latin-1 -*-\nx = 'é'\n"),
        (b"#!/bin/python\n# vim: set fileencoding=cp1252 :\nx = '\x80'\n", None),
        (b"x = 1\r\ny = 2\rz = 3\n", "x = 1\ny = 2\nz = 3\n"),
        (b"\x0cx = 1\n\x0c\ny = 2", "\x0cx = 1\n\x0c\ny = 2"),
        (b"", ""),
        # Too late to be a declaration.
        (b"import os\n# coding: nonsense\n", "import os\n# coding: nonsense\n"),
    ],
    ids=["utf-8", "bom", "latin-1", "second line", "mixed newlines", "form feed", "empty", "no cookie"],
)
def test_a_file_is_read_and_given_back_byte_for_byte(data, text):
    script = script_from_bytes(data, "a.py")
    assert text is None or script.text == text
    assert script.file_bytes(script.file_text(script.text)) == data


@pytest.mark.parametrize(
    ("data", "reason", "line"),
    [
        (b"a\nb\nx = '\xff'\n", "not UTF-8 (byte 0xff at line 3); save it as UTF-8, or declare its encoding", 3),
        (b"\xff\xfex\0=\0001\0", "it looks like UTF-16, which Python does not read", 1),
        (b"# coding: cp932x\n", "declares the encoding 'cp932x', which Python does not know", None),
        (b"# coding: rot13\n", "declares the encoding 'rot13', which Python does not know", None),
        (b"# coding: ascii\n\xe9", "not ascii, the encoding it declares (byte 0xe9 at line 2)", 2),
        (
            b"\xef\xbb\xbf# coding: latin-1\n",
            "declares the encoding latin-1 in line 1 but starts with a UTF-8 byte order mark",
            1,
        ),
        (b"a\nb\0\n", "not a text file: null byte at line 2", 2),
        (b"x = (\n", "syntax error at line 1: '(' was never closed", 1),
        (b"if x:\npass\n", "syntax error at line 2: expected an indented block", 2),
        (b"x = " + b"(" * 5000 + b")" * 5000, "", None),
        (b"-" * 100_000 + b"1", "nested too deeply", None),
    ],
)
def test_what_cannot_be_read_says_why(data, reason, line):
    error = unreadable(data)
    assert reason in error.reason
    assert "\n" not in error.reason
    assert line is None or error.line == line
    assert str(error) == f"a.py: {error.reason}"


def test_files_that_are_none(tmp_path):
    large, pipe = tmp_path / "large.py", tmp_path / "pipe.py"
    large.write_bytes(b"#" * 10_000_001)
    os.mkfifo(pipe)
    for path, reason in ((large, "larger than 5 MB"), (pipe, "not a file"), (tmp_path / "no.py", "no such file")):
        with pytest.raises(UnreadableFile, match=reason):
            read_script(str(path))
    with pytest.raises(UnreadableFile, match="null"):
        read_script("a\0b.py")


def test_unreadable_crosses_processes():
    error = pickle.loads(pickle.dumps(UnreadableFile("a.py", "why", 3)))
    assert (error.path, error.reason, error.line) == ("a.py", "why", 3)


def test_warnings_about_other_peoples_strings_are_not_ours(recwarn):
    script_from_text('"\\d" is 1\n', "a.py")
    assert not recwarn.list


def test_an_edit_that_the_encoding_lacks_is_refused():
    script = script_from_bytes(b"# coding: latin-1\n", "a.py")
    with pytest.raises(UnreadableFile, match="cannot be written in its encoding, latin-1"):
        script.file_bytes("# coding: latin-1\n€")


LINES = st.lists(st.sampled_from(["a", "b", "", "x = 1"]), max_size=8)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@given(LINES, st.data())
def test_unchanged_text_keeps_every_line_ending(lines, data):
    raw = "".join(line + data.draw(ENDS) for line in lines)
    text = raw.replace("\r\n", "\n").replace("\r", "\n")
    # A line that ends in \r before an empty one that ends in \n is one line that ends in \r\n.
    assert with_newlines_of(raw, text) == raw


@given(LINES, ENDS, st.text("ab\n", max_size=10))
def test_new_lines_end_as_the_others(lines, end, added):
    raw = "".join(line + end for line in lines)
    new = added + raw.replace(end, "\n")
    if lines:
        assert with_newlines_of(raw, new) == new.replace("\n", end)


def test_a_line_put_between_mixed_ones_disturbs_none():
    assert with_newlines_of("a\r\nb\nc\r\nd", "a\nb\nnew\nc\nd") == "a\r\nb\nnew\r\nc\r\nd"


# Places.


def test_columns_count_characters():
    script = script_from_text("größe = 'ü'; bad(1)\n", "a.py")
    place = script.place(first(script, ast.Call))
    assert (place.line, place.column, place.end_line, place.end_column) == (1, 14, 1, 20)
    assert script.segment(first(script, ast.Call)) == "bad(1)"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n'\\"), max_size=20))
def test_the_segment_of_a_node_is_its_text(text):
    script = script_from_text(f"x = '{text}', call( a )\n", "a.py")
    assert script.segment(first(script, ast.Call)) == "call( a )"
    assert script.segment(first(script, ast.Constant)) == f"'{text}'"


def test_every_node_of_real_files_has_a_place_and_its_own_text():
    for path in (bisect.__file__, textwrap.__file__, ast.__file__)[: 1 + 2 * NIGHTLY]:
        script = read_script(path)
        for node in ast.walk(script.tree):
            place = script.place(node)
            assert place.line >= 1
            # In f-strings positions are off before Python 3.12.
            if isinstance(node, ast.Call | ast.stmt) and "f'" not in script.text and 'f"' not in script.text:
                assert script.segment(node) == ast.get_source_segment(script.text, node)


def test_nodes_without_a_position_have_that_of_their_parts():
    script = script_from_text("def f(a, b=1): pass\nwith open() as g: pass\n", "a.py")
    assert script.segment(first(script, ast.arguments)) == "a, b=1"
    assert script.segment(first(script, ast.withitem)) == "open() as g"
    empty = script_from_text("", "a.py")
    assert str(empty.place(empty.tree)) == "a.py:1:1"


# Edits.

INSERTED = [
    ("step()\n", "new()\nstep()\n", "step()\nnew()\n"),
    ("    step()  # why\n", "    new()\n    step()  # why\n", "    step()  # why\n    new()\n"),
    (
        "    step(\n        1,\n    )\n",
        "    new()\n    step(\n        1,\n    )\n",
        "    step(\n        1,\n    )\n    new()\n",
    ),
    ("    if a: step()\n", "    if a: new(); step()\n", "    if a: step(); new()\n"),
    ("    a(); step(); b()\n", "    a(); new(); step(); b()\n", "    a(); step(); new(); b()\n"),
    ("    x = step()\n", "    new()\n    x = step()\n", "    x = step()\n    new()\n"),
    ("\tstep()", "\tnew()\n\tstep()", "\tstep()\n\tnew()"),
    ("    if a: \\\n  step()\n", "    if a: \\\n  new(); step()\n", "    if a: \\\n  step(); new()\n"),
    ("    é = step()\n", "    new()\n    é = step()\n", "    é = step()\n    new()\n"),
]


@pytest.mark.parametrize(("body", "before", "after"), INSERTED)
def test_statements_are_inserted_where_they_parse(body, before, after):
    head = "" if body[0] not in " \t" else "if x:\n"
    script = script_from_text(head + body, "a.py")
    call = next(node for node in ast.walk(script.tree) if isinstance(node, ast.Call) and node.func.id == "step")
    for edit, expected in ((script.insert_before(call, "new()"), before), (script.insert_after(call, "new()"), after)):
        text = apply(script, edit)
        assert text == head + expected
        ast.parse(text)


def test_lines_go_around_a_whole_compound_statement():
    source = "if x:\n    @wrap\n    def f(): pass\n    if a:\n        b()\n    elif c:\n        d()\n    else: e()\n"
    script = script_from_text(source, "a.py")
    function, branch = first(script, ast.FunctionDef), script.tree.body[0].body[1]
    assert apply(script, script.insert_before(function, "a()\nb()")) == source.replace(
        "    @wrap", "    a()\n    b()\n    @wrap"
    )
    elif_branch = branch.orelse[0]
    assert apply(script, script.insert_before(elif_branch.test, "n()")) == source.replace(
        "    if a", "    n()\n    if a"
    )
    assert apply(script, script.insert_after(elif_branch.test, "n()")) == source + "    n()\n"[:-1] + "\n"


def test_replace_and_positions():
    script = script_from_text("a = old(ü)\n", "a.py")
    call = first(script, ast.Call)
    assert apply(script, script.replace(call.func, "new")) == "a = new(ü)\n"
    assert apply(script, script.insert_after((1, 2), "!")) == "a! = old(ü)\n"
    edit = script.replace(call, "x")
    assert script.text[slice(*script.offsets(edit))] == "old(ü)"
