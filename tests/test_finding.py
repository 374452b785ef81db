"""Rule, Finding and Place: what they hold, and what they refuse to hold."""

import json
import re
from dataclasses import FrozenInstanceError

import pytest

from ampwise.finding import Place, Rule, Severity

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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": "AMP1"}, "rule code 'AMP1' is not capital letters and three digits, as AMP101 is"),
        ({"code": "amp101"}, "rule code 'amp101' is not capital letters and three digits, as AMP101 is"),
        ({"code": "AMP101\n"}, r"rule code 'AMP101\n' is not capital letters and three digits, as AMP101 is"),
        ({"name": "Clip_Grads"}, "rule AMP101: name 'Clip_Grads' is not kebab-case, as clip-scaled-grads is"),
        (
            {"name": "clip--grads"},
            "rule AMP101: name 'clip--grads' is not kebab-case, as clip-scaled-grads is",
        ),
        ({"severity": "error"}, "rule AMP101: severity 'error' is not a Severity"),
        ({"why": " \n"}, "rule AMP101: why is empty"),
        ({"good": ""}, "rule AMP101: good is empty"),
    ],
)
def test_a_malformed_rule_is_refused(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Rule(**{**GOOD, **change})


def test_a_plugin_may_bring_its_own_letters():
    assert Rule(**{**GOOD, "code": "ACME001"}).code == "ACME001"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"line": 0}, "Place(line=0): lines and columns count from 1"),
        ({"line": 3, "column": 0}, "Place(column=0): lines and columns count from 1"),
        ({"column": 3}, "Place: a column or an end without a line is no place; give the line too"),
        (
            {"end_line": 3, "end_column": 1},
            "Place: a column or an end without a line is no place; give the line too",
        ),
        ({"line": 3, "end_line": 4}, "Place: end_line and end_column come together"),
        (
            {"line": 3, "column": 9, "end_line": 3, "end_column": 8},
            "Place: the end (3, 8) lies before the start (3, 9)",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused(parts, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Place(file="train.py", **parts)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (Place(), "(nowhere)"),
        (Place(file="a.py"), "a.py"),
        (Place(file="a.py", line=3), "a.py:3"),
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
    rule = Rule(**GOOD)
    finding = rule.at(Place(file="a.py", line=2), "here", evidence={"scale": 2.0})
    assert json.loads(json.dumps(finding.as_dict())) == {
        "code": "AMP101",
        "name": "clip-scaled-grads",
        "severity": "error",
        "message": "here",
        "place": {"file": "a.py", "line": 2},
        "evidence": {"scale": 2.0},
        "fix": rule.fix,
    }
    as_data = json.loads(json.dumps(rule.as_dict()))
    assert as_data == {**GOOD, "severity": "error", "on_by_default": True, "url": None}
