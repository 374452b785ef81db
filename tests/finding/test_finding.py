"""Rule, Finding and Place: what they hold, and what they refuse to hold."""

import json
import re
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding import Edit, Place, Rule, Severity, edited

from ..for_each import for_each

GOOD = {
    "code": "AMP101",
    "name": "clip-scaled-grads",
    "severity": Severity.ERROR,
    "summary": "Gradients are clipped while still scaled",
    "why": "The threshold is 65536 times too small.",
    "fix": "Call scaler.unscale_(optimizer) first.",
    "bad": "clip_grad_norm_(parameters, 1.0)",
    "good": "scaler.unscale_(optimizer)",
}


@for_each(
    ("change", "message"),
    [
        ({"code": "AMP1"}, "rule code 'AMP1': expected capital letters and three digits, such as AMP101"),
        ({"code": "amp101"}, "rule code 'amp101': expected capital letters and three digits, such as AMP101"),
        ({"code": "AMP101\n"}, r"rule code 'AMP101\n': expected capital letters and three digits, such as AMP101"),
        ({"name": "Clip_Grads"}, "rule AMP101: name 'Clip_Grads': expected kebab-case, such as clip-scaled-grads"),
        (
            {"name": "clip--grads"},
            "rule AMP101: name 'clip--grads': expected kebab-case, such as clip-scaled-grads",
        ),
        ({"severity": "error"}, "rule AMP101: severity 'error' is not a Severity"),
        ({"why": " \n"}, "rule AMP101: why is empty"),
        ({"good": ""}, "rule AMP101: good is empty"),
        ({"fixable": "never"}, """rule AMP101: fixable 'never': expected "always", "sometimes" or \"\""""),
    ],
)
def test_a_malformed_rule_is_refused(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Rule(**{**GOOD, **change})


def test_a_plugin_may_bring_its_own_letters():
    assert Rule(**{**GOOD, "code": "ACME001"}).code == "ACME001"


@for_each(
    ("parts", "message"),
    [
        ({"line": 0}, "Place(line=0): lines and columns count from 1"),
        ({"line": 3, "column": 0}, "Place(column=0): lines and columns count from 1"),
        ({"column": 3}, "Place: a column or an end needs a line; give the line too"),
        (
            {"end_line": 3, "end_column": 1},
            "Place: a column or an end needs a line; give the line too",
        ),
        ({"line": 3, "end_line": 4}, "Place: give both end_line and end_column, or neither"),
        (
            {"line": 3, "column": 9, "end_line": 3, "end_column": 8},
            "Place: the end (3, 8) is before the start (3, 9)",
        ),
        ({"cell": 0}, "Place(cell=0): the cells of a notebook count from 1"),
        ({"file": None, "cell": 2}, "Place: a cell needs a file; give the notebook too"),
    ],
)
def test_a_place_that_cannot_be_is_refused(parts, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Place(**{"file": "train.py", **parts})


@for_each(
    ("place", "text"),
    [
        (Place(), "(nowhere)"),
        (Place(file="a.py"), "a.py"),
        (Place(file="a.py", line=3), "a.py:3"),
        (Place(file="a.ipynb", cell=2), "a.ipynb:cell 2"),
        (Place(file="a.ipynb", cell=2, line=3, column=4), "a.ipynb:cell 2:3:4"),
        (Place(device="NVIDIA T4"), "NVIDIA T4"),
        (Place(module="blocks.0", step=7), "blocks.0 at step 7"),
        (Place(module="blocks.0", parameter="blocks.0.weight"), "blocks.0.weight"),
        (Place(step=0), "at step 0"),
        (Place(rank=0), "on rank 0"),
    ],
)
def test_a_place_reads_as_a_person_would_say_it(place, text):
    assert str(place) == text


def test_a_place_as_data_keeps_zeros_and_drops_unknowns():
    assert Place(file="a.py", step=0).as_dict() == {"file": "a.py", "step": 0}


def test_severities_rank_from_worst():
    assert sorted(Severity, key=lambda severity: severity.rank) == ["error", "warning", "info"]


def test_a_finding_takes_the_rules_fix_unless_it_has_its_own():
    rule = Rule(**GOOD)
    assert rule.at(Place(), "here").fix == rule.fix
    assert rule.at(Place(), "here", fix="Move line 4 up.").fix == "Move line 4 up."


def test_evidence_is_copied_and_a_finding_cannot_be_changed():
    evidence = {"scale": 65536.0}
    finding = Rule(**GOOD).at(Place(), "here", evidence=evidence)
    evidence["scale"] = 1.0
    assert finding.evidence == {"scale": 65536.0}
    with pytest.raises(FrozenInstanceError):
        finding.message = "there"


def test_finding_and_rule_as_data_are_plain_json():
    rule = Rule(**GOOD, fixable="sometimes")
    edits = [Edit(2, 1, 2, 3, "x"), Edit(3, 1, 3, 1, "y", cell=4)]
    finding = rule.at(Place(file="a.py", line=2), "here", evidence={"scale": 2.0}, edits=edits, safe=False)
    assert json.loads(json.dumps(finding.as_dict())) == {
        "code": "AMP101",
        "name": "clip-scaled-grads",
        "severity": "error",
        "message": "here",
        "place": {"file": "a.py", "line": 2},
        "evidence": {"scale": 2.0},
        "fix": rule.fix,
        "edits": [
            {"line": 2, "column": 1, "end_line": 2, "end_column": 3, "content": "x"},
            {"line": 3, "column": 1, "end_line": 3, "end_column": 1, "content": "y", "cell": 4},
        ],
        "safe": False,
    }
    as_data = json.loads(json.dumps(rule.as_dict()))
    assert as_data == {**GOOD, "severity": "error", "on_by_default": True, "url": None, "fixable": "sometimes"} | {
        "consequence_of": []
    }


@for_each(
    ("parts", "message"),
    [
        ((0, 1, 1, 1), "Edit(line=0): lines, columns and cells count from 1"),
        ((1, 1, 1, 0), "Edit(end_column=0): lines, columns and cells count from 1"),
        ((1, 5, 1, 4), "Edit: the end (1, 4) is before the start (1, 5)"),
        ((2, 1, 1, 9), "Edit: the end (1, 9) is before the start (2, 1)"),
    ],
)
def test_an_edit_that_cannot_be_is_refused(parts, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Edit(*parts, "")
    with pytest.raises(ValueError, match=r"^Edit\(cell=0\)"):
        Edit(1, 1, 1, 1, "", cell=0)


@for_each(
    ("one", "other", "overlap"),
    [
        ((1, 1, 1, 5), (1, 4, 1, 9), True),
        ((1, 1, 3, 1), (2, 1, 2, 1), True),  # an insertion within what is replaced
        ((1, 1, 1, 5), (1, 1, 1, 5), True),
        ((1, 1, 1, 5), (1, 5, 1, 9), False),  # they only touch
        ((1, 1, 1, 1), (1, 1, 1, 5), False),
        ((1, 5, 1, 5), (1, 1, 1, 5), False),
        ((1, 3, 1, 3), (1, 3, 1, 3), False),
    ],
)
def test_which_edits_overlap(one, other, overlap):
    one, other = Edit(*one, "a"), Edit(*other, "b")
    assert one.overlaps(other) is other.overlaps(one) is overlap
    assert not one.overlaps(Edit(*other.start, *other.end, "b", cell=2)), "another cell is another text"


def test_a_finding_whose_edits_contradict_it_is_refused():
    fixable = Rule(**GOOD, fixable="always")
    edit, place = Edit(1, 1, 1, 5, "a"), Place(file="a.py", line=1)
    with pytest.raises(ValueError, match=r"^rule AMP101: the edits Edit\(line=1.*'a'.* and Edit\(.*'b'.*\) overlap$"):
        fixable.at(place, "here", edits=[edit, Edit(1, 4, 1, 6, "b")])
    with pytest.raises(
        ValueError, match=r"^rule AMP101: a finding has edits, but the rule is not fixable; set fixable$"
    ):
        Rule(**GOOD).at(place, "here", edits=[edit])
    with pytest.raises(ValueError, match=r"^rule AMP101: edits need a file; give the place a file$"):
        fixable.at(Place(), "here", edits=[edit])
    assert fixable.at(place, "here", edits=iter([edit])).edits == (edit,)


@for_each(
    ("edit", "message"),
    [
        (Edit(1, 5, 1, 5, ""), "the edit at 1:5 is outside the text"),
        (Edit(3, 1, 3, 1, ""), "the edit at 3:1 is outside the text"),
        (Edit(1, 1, 9, 1, ""), "the edit at 9:1 is outside the text"),
    ],
)
def test_an_edit_outside_the_text_is_an_error(edit, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        edited("abc\ndef", [edit])
    assert edited("abc\ndef", [Edit(1, 4, 2, 4, "!")]) == "abc!"


def test_edits_that_overlap_are_an_error():
    with pytest.raises(ValueError, match=r"^the edit at 1:2 overlaps the previous one$"):
        edited("abc", [Edit(1, 2, 1, 4, ""), Edit(1, 1, 1, 3, "")])


texts = st.text(st.sampled_from("ab \n\x0cü💥"), max_size=40)


def position(text, offset):
    """The line and column of an offset, the slow way."""
    before = text[:offset]
    return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


@st.composite
def texts_with_edits(draw):
    """A text, and edits of it that do not overlap, as (start, stop, content) in order."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    return text, [(start, stop, draw(texts)) for start, stop in spans]


def as_edits(text, spans):
    return [Edit(*position(text, start), *position(text, stop), content) for start, stop, content in spans]


@given(texts_with_edits(), st.randoms())
def test_edits_are_splices_by_offset_in_any_order(case, random):
    """The oracle: offsets count what lines and columns count."""
    text, spans = case
    expected, reached = "", 0
    for start, stop, content in spans:
        expected, reached = expected + text[reached:start] + content, stop
    expected += text[reached:]
    edits = as_edits(text, spans)
    assert edited(text, edits) == expected
    if len({(edit.start, edit.end) for edit in edits}) == len(edits):  # else their order is part of what is asked
        random.shuffle(edits)
        assert edited(text, edits) == expected


@given(texts_with_edits())
def test_edits_one_by_one_from_the_end_are_the_edits_together(case):
    text, spans = case
    edits = as_edits(text, spans)
    one_by_one = text
    for edit in reversed(edits):
        one_by_one = edited(one_by_one, [edit])
    assert edited(text, edits) == one_by_one


@given(texts)
def test_no_edits_and_edits_that_change_nothing_leave_the_text(text):
    assert edited(text, []) == text
    assert edited(text, as_edits(text, [(0, len(text), text)])) == text


def test_a_finding_is_printed_as_text_and_shown_short():
    fix = "Tried:\n    y = x.clamp(max=10)\nIn general: \x1b[2J"
    finding = Rule(**GOOD).at(Place(file="train.py", line=18), "it is\x1b[2J so", evidence={"trace": {}}, fix=fix)
    assert repr(finding) == "<Finding AMP101 clip-scaled-grads at train.py:18>"
    assert str(finding).splitlines() == [
        r"train.py:18: AMP101 clip-scaled-grads: it is\x1b[2J so",
        "    Tried:",
        "        y = x.clamp(max=10)",
        r"    In general: \x1b[2J",
    ]
