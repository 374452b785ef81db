"""How often each rule was broken."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput
from ampwise.finding import Edit
from ampwise.report.printers import output_formats
from ampwise.report.printers.summary import render_statistics

EDITS = [Edit(1, 1, 1, 1, "x")]


@pytest.fixture
def findings(finding):
    def several(count, code, name, **more):
        return [finding(code=code, name=name, file="a.py", line=line + 1, **more) for line in range(count)]

    return [
        *several(1, "AMP102", "not-mended"),
        *several(10, "AMP205", "all-mended", edits=EDITS),
        *several(1, "AMP101", "some-mended", edits=EDITS, safe=False),
        *several(1, "AMP101", "some-mended", edits=EDITS),
    ]


def test_the_most_frequent_first_with_what_fix_fixes(findings):
    assert render_statistics(findings, "concise") == (
        "10  AMP205  [*] all-mended\n"
        " 2  AMP101  [-] some-mended\n"
        " 1  AMP102  [ ] not-mended\n"
        "Found 13 findings (13 errors).\n"
        "[*] 11 fixable with `ampwise check --fix a.py` (1 more with `--unsafe-fixes`).\n"
    )


def test_no_marks_where_nothing_can_be_fixed(finding):
    assert render_statistics([finding()], "full") == "1  AMP101  clip-scaled-grads\nFound 1 finding (1 error).\n"


def test_json_has_ruffs_fields(findings):
    counts = json.loads(render_statistics(findings, "json"))
    assert counts[1] == {
        "code": "AMP101",
        "name": "some-mended",
        "severity": "error",
        "count": 2,
        "fixable": True,
        "fixable_count": 1,
    }
    assert [row["fixable"] for row in counts] == [True, True, False]


def test_nothing_found():
    assert render_statistics([], "full") == "All checks passed!\n"
    assert render_statistics([], "json") == "[]\n"


@pytest.mark.parametrize("name", output_formats())
def test_every_format_counts_or_says_that_it_cannot(name, finding):
    if name in ("gitlab", "sarif"):
        with pytest.raises(
            BadInput, match=f"^--statistics does not support {name}. Use --output-format concise or json"
        ):
            render_statistics([finding()], name)
    else:
        assert "AMP101" in render_statistics([finding()], name)


@given(st.lists(st.sampled_from(["AMP101", "AMP102", "AMP103"])))
def test_counts_add_up(finding, codes):
    counts = json.loads(render_statistics([finding(code=code) for code in codes], "json"))
    assert {row["code"]: row["count"] for row in counts} == {code: codes.count(code) for code in set(codes)}
    assert [row["count"] for row in counts] == sorted((row["count"] for row in counts), reverse=True)
