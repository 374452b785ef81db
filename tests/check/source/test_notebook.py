"""Notebooks: which cells are Python, where their parts are, and the JSON kept but for what changed."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check.source.script import UnreadableFile, script_from_bytes, script_from_text


def notebook(*sources, **more):
    cells = [source if isinstance(source, dict) else {"cell_type": "code", "source": source} for source in sources]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5, **more}


def read(*sources, **options):
    return script_from_text(json.dumps(notebook(*sources), **options), "a.ipynb")


def names(script):
    return [node.id for node in ast.walk(script.tree) if isinstance(node, ast.Name)]


MARKDOWN = {"cell_type": "markdown", "source": "# not python ("}


def test_places_count_cells_as_jupyter_does_and_lines_within_them():
    script = read("a = 1", MARKDOWN, ["\n", "if a:\n", "    bad(ü=1)"])
    call = next(node for node in ast.walk(script.tree) if isinstance(node, ast.Call))
    place = script.place(call)
    assert str(place) == "a.ipynb:cell 3:3:5"
    assert (place.end_line, place.end_column) == (3, 13)
    edit = script.insert_before(call, "new()")
    assert (edit.cell, edit.line, edit.column, edit.content) == (3, 3, 5, "new()\n    ")
    assert script.text[: script.offsets(edit)[0]].endswith("if a:\n    ")
    assert script.lines[script.line_of(place) - 1] == "    bad(ü=1)"


@pytest.mark.parametrize(
    ("cell", "seen"),
    [
        ("%matplotlib inline\na", ["a"]),
        ("!pip install \\\n   torch\na", ["a"]),
        ("files = !ls *.py\na", ["files", "a"]),
        ("files = %sql select 1\na", ["files", "a"]),
        ("if b:\n    !ls\na", ["b", "a"]),
        ("?print\na?\nmodel.fit??\na", ["a"]),
        ("%time fit(a)", ["fit", "a"]),
        ("%%time\nfit(a)", ["fit", "a"]),
        ("%%capture out\n!ls\nfit(a)", ["fit", "a"]),
        ("%%bash\necho $a", []),
        ("%%html\n<a>", []),
        ("x = (a\n  % b)", ["x", "a", "b"]),
        ("!ls\nx = (a\n  % b)", ["x", "a", "b"]),
        ("x = '''\n%d\n!\n'''\n!ls", ["x"]),
        ("await a", ["a"]),
        ("", []),
    ],
)
def test_magics_give_way_and_the_rest_is_read(cell, seen):
    script = read("before", cell, "after")
    assert sorted(names(script)) == sorted(["before", *seen, "after"])
    assert not script.notes
    assert script.parsed.count("\n") == script.text.count("\n")


def test_a_timed_statement_keeps_its_column():
    script = read("%time fit(a)")
    call = next(node for node in ast.walk(script.tree) if isinstance(node, ast.Call))
    assert script.place(call).column == 7


@pytest.mark.parametrize("broken", ["def (", "x = '''", "if x:", "x = 1 \\", "%%time\ndef (", "\0", "\ud800"])
def test_only_the_cell_that_does_not_parse_is_left_out(broken):
    script = read("a", broken, "    \nb")
    assert names(script) == ["a", "b"]
    assert len(script.notes) == 1
    assert script.notes[0].startswith("cell 2 was not checked: ")


def test_the_note_counts_lines_within_the_cell():
    assert read("%%time\na\ndef (").notes == ("cell 1 was not checked: syntax error at line 3: invalid syntax",)


def test_other_languages_are_left_alone():
    for metadata in ({"kernelspec": {"language": "R"}}, {"language_info": {"name": "julia"}}):
        text = json.dumps(notebook("x <- 1", metadata=metadata))
        assert script_from_text(text, "a.ipynb").cells == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "a broken notebook: Expecting property name enclosed in double quotes at line 1"),
        ("", "a broken notebook: Expecting value at line 1"),
        ("[]", "not a notebook: its JSON has no nbformat"),
        ("{}", "not a notebook: its JSON has no nbformat"),
        ('{"nbformat": 3}', "a notebook of format 3; convert it to format 4: `jupyter nbconvert --to notebook"),
        ('{"nbformat": 5}', "a notebook of format 5; only format 4 can be read"),
        ('{"nbformat": 4, "cells": 1}', "its cells are not a list"),
        ('{"nbformat": 4, "cells": [1]}', "cell 1 is not an object"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code"}]}', "cell 1 has no source"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "source": [1]}]}', "cell 1 has no source"),
        ("[" * 100_000, "a broken notebook: its JSON is nested too deeply"),
        ('{"nbformat": 4} {}', "a broken notebook: Extra data at line 1"),
    ],
)
def test_what_is_no_notebook_says_why(text, reason):
    with pytest.raises(UnreadableFile) as caught:
        script_from_text(text, "a.ipynb")
    assert reason in caught.value.reason


def test_not_utf8():
    with pytest.raises(UnreadableFile, match="not UTF-8"):
        script_from_bytes(b'{"nbformat": "\xff"}', "a.ipynb")


CELLS = st.lists(
    st.one_of(st.sampled_from(["a = 1", "%x", "x = 'é'\ny", "b\n", "\n", "# %% cell 1\n", "def ("]), st.just(MARKDOWN)),
    max_size=5,
)
STYLES = st.fixed_dictionaries(
    {"indent": st.sampled_from([None, 1, 2, "\t"]), "ensure_ascii": st.booleans(), "sort_keys": st.booleans()}
)


def as_lines(cell, many):
    return cell.splitlines(keepends=True) if many and isinstance(cell, str) else cell


@given(CELLS, STYLES, st.booleans(), st.sampled_from(["", "\n"]), st.booleans())
def test_a_notebook_is_given_back_byte_for_byte(cells, style, many, end, bom):
    data = json.dumps(notebook(*(as_lines(cell, many) for cell in cells)), **style).encode() + end.encode()
    data = b"\xef\xbb\xbf" + data if bom else data
    script = script_from_bytes(data, "a.ipynb")
    assert script.file_bytes(script.file_text(script.text)) == data


@given(CELLS, STYLES, st.booleans(), st.sampled_from(["", "\n"]))
def test_an_edit_is_what_json_would_have_written(cells, style, many, end):
    """Oracle: the edited notebook, dumped in the same style."""

    def edited(text):
        return text.replace("a = 1", "a = 2\nmore()").replace("x = 'é'", "x = 2")

    def dumped(cells):
        return json.dumps(notebook(*(as_lines(cell, many) for cell in cells)), **style) + end

    script = script_from_text(dumped(cells), "a.ipynb")
    # Magics and cells that do not parse have neither.
    expected = dumped([edited(cell) if isinstance(cell, str) else cell for cell in cells])
    assert script.file_text(edited(script.text)) == expected


def test_odd_json_of_other_lines_and_keys_is_kept():
    text = (
        '{ "nbformat":4,"cells" : [{"outputs":["\\u00e9", 1.0e5],"cell_type":"code",\n'
        '"source":["a\\/b\\n",\n   "bad()\\n",\n   "é\\u00e9"]} ] }'
    )
    script = script_from_text(text, "a.ipynb")
    assert script.file_text(script.text.replace("bad()", "good()")) == text.replace("bad()", "good()")
