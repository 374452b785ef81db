"""Comments that suppress: which findings, and what is no such comment."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check.noqa import add_noqa_comments, read_suppressions
from ampwise.check.source.script import script_from_text
from ampwise.finding import Rule, Severity

RULE = Rule(code="AMP101", name="call-bad", severity=Severity.INFO, summary="s", why="w", fix="f", bad="b", good="g")


def findings(script):
    calls = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call)]
    return [RULE.at(script.place(node), "m") for node in calls if ast.unparse(node.func) == "bad"]


def kept(text, path="a.py"):
    script = script_from_text(text, path)
    found = read_suppressions(script, findings(script))
    return [finding for finding in findings(script) if not found.cover(finding, script.line_of(finding.place))]


@pytest.mark.parametrize(
    "text",
    [
        "bad()  # noqa",
        "bad()  #noqa",
        "bad()  # NOQA : AMP101".replace(" :", ":"),
        "bad()  # noqa: AMP101",
        "bad()  # noqa:amp101",
        "bad()  # noqa: E501, AMP101",
        "bad()  # noqa: E501 AMP101 because of this",
        "bad()  # noqa: call-bad",
        "bad()  # type: ignore # noqa: AMP101",
        "bad()  # why  # noqa",
        "bad(\n    1,\n)  # noqa: AMP101",
        "x = [  # noqa: AMP101\n    1,\n    bad(),\n]",
        "x = [\n    1,\n    bad(),  # noqa\n]",
        "bad('''\n# not this\n''')  # noqa",
        "if bad():  # noqa\n    pass",
        "# ampwise: noqa\nbad()",
        "bad()\n# ampwise: noqa: AMP101",
        "def f():\n    # ampwise:noqa:call-bad\n    bad()",
    ],
)
def test_suppressed(text):
    assert kept(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "bad()  # noqa: E501",
        "bad()  # noqa: AMP102, AMP1011",
        "bad()  # noqa: because",
        "bad()  # noqa:",
        "bad()  # noqaX",
        "bad()  # see noqa",
        "bad('# noqa')",
        "bad('''\n# noqa\n''')",
        "# noqa\nbad()",
        "bad()\n# noqa",
        "if x:  # noqa\n    bad()",
        "bad(); x = '# ampwise: noqa'",
        "# ampwise: noqa: AMP102\nbad()",
        "'''\n# ampwise: noqa\n'''\nbad()",
        "x = [\n    1,  # noqa\n    bad(),\n    2,\n]",
    ],
)
def test_not_suppressed(text):
    assert len(kept(text)) == 1


def test_in_a_notebook_lines_are_those_of_the_cell():
    import json

    cells = [{"cell_type": "code", "source": source} for source in ("bad()", "%magic\nbad()  # noqa", "bad()")]
    text = json.dumps({"nbformat": 4, "cells": cells})
    assert [finding.place.cell for finding in kept(text, "a.ipynb")] == [1, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bad()\n", "bad()  # noqa: AMP101\n"),
        ("bad()  # why\n", "bad()  # why  # noqa: AMP101\n"),
        ("bad()  # noqa: E501\n", "bad()  # noqa: E501, AMP101\n"),
        ("bad()  # noqa: E501 (long)\n", "bad()  # noqa: E501, AMP101 (long)\n"),
        ("bad(\n  '''\n''')", "bad(\n  '''\n''')  # noqa: AMP101"),
        ("x = bad() + \\\n  1\n", "x = bad() + \\\n  1  # noqa: AMP101\n"),
        ("bad(); bad()\n", "bad(); bad()  # noqa: AMP101\n"),
    ],
)
def test_comments_are_added(text, expected):
    script = script_from_text(text, "a.py")
    assert add_noqa_comments(script, findings(script)) == expected


STATEMENTS = st.sampled_from(
    [
        "bad()",
        "x = 1",
        "bad(\n  1\n)",
        "if bad():\n    bad()",
        "'''\n#'''",
        "bad() # c",
        "bad() # noqa: E1",
        "f'''{bad()}\n'''",
    ]
)


@given(st.lists(STATEMENTS, max_size=6))
def test_what_was_added_suppresses_all_and_changes_no_code(statements):
    script = script_from_text("\n".join(statements), "a.py")
    text = add_noqa_comments(script, findings(script))
    assert kept(text) == []
    assert ast.dump(ast.parse(text)) == ast.dump(script.tree)
