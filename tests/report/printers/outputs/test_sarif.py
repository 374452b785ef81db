import json
from types import SimpleNamespace

import pytest

from ampwise.finding import Edit, Severity
from ampwise.finding.registry import find_rule
from ampwise.report.printers.outputs import sarif
from ampwise.report.printers.rule_page import rule_page


@pytest.fixture
def rendered(validate_sarif):
    def rendered(*findings):
        log = json.loads(sarif.render(findings))
        validate_sarif(log)
        assert log["version"] == "2.1.0"
        return log["runs"][0]

    return rendered


@pytest.fixture
def location(rendered):
    def location(finding):
        (found,) = rendered(finding)["results"][0]["locations"]
        return found

    return location


def test_the_schema_can_refuse(validate_sarif, finding):
    import jsonschema

    log = json.loads(sarif.render([finding(file="a.py", line=1)]))
    validate_sarif(log)
    log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    with pytest.raises(jsonschema.ValidationError, match="less than the minimum"):
        validate_sarif(log)


def test_rules_and_results_refer_to_each_other(rendered, finding):
    run = rendered(
        finding("b", code="AMP205", name="b", severity=Severity.INFO),
        finding("a", code="AMP101", name="a"),
        finding("c", code="AMP205", name="b", severity=Severity.INFO),
    )
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["AMP101", "AMP205"]
    assert [(r["ruleId"], r["ruleIndex"], r["level"]) for r in run["results"]] == [
        ("AMP205", 1, "note"),
        ("AMP101", 0, "error"),
        ("AMP205", 1, "note"),
    ]


def test_a_rule_says_all_it_knows(rendered, finding):
    assert rendered(finding(severity=Severity.WARNING))["tool"]["driver"]["rules"] == [
        {
            "id": "AMP101",
            "name": "clip-scaled-grads",
            "shortDescription": {"text": "Gradients are clipped while still scaled"},
            "fullDescription": {"text": "The threshold is 65536 times too small."},
            "help": {"text": "Call scaler.unscale_(optimizer) first."},
            "helpUri": rule_page(find_rule("AMP101")),
            "defaultConfiguration": {"level": "warning", "enabled": True},
        }
    ]


def test_a_region_counts_from_one_and_has_only_what_is_known(location, finding):
    whole = finding(file="a.py", line=2, column=5, end_line=3, end_column=1)
    region = {"startLine": 2, "startColumn": 5, "endLine": 3, "endColumn": 1}
    assert location(whole)["physicalLocation"]["region"] == region
    assert location(finding(file="a.py", line=2))["physicalLocation"]["region"] == {"startLine": 2}
    assert "region" not in location(finding(file="a.py"))["physicalLocation"]


@pytest.mark.parametrize(
    ("file", "artifact"),
    [
        ("a b/ü.py", {"uri": "a%20b/%C3%BC.py", "uriBaseId": "%SRCROOT%"}),
        ("a:b#c?.py", {"uri": "a%3Ab%23c%3F.py", "uriBaseId": "%SRCROOT%"}),
        ("\udcff.py", {"uri": "%FF.py", "uriBaseId": "%SRCROOT%"}),
        ("\ud800.py", {"uri": "%5Cud800.py", "uriBaseId": "%SRCROOT%"}),
        ("/else where/a.py", {"uri": "file:///else%20where/a.py"}),
    ],
)
def test_uris(location, finding, file, artifact):
    assert location(finding(file=file))["physicalLocation"]["artifactLocation"] == artifact


@pytest.mark.parametrize(
    ("place", "kind"), [({"parameter": "a.weight"}, "parameter"), ({"module": "a.weight"}, "module")]
)
def test_a_finding_without_a_file_has_a_logical_location_only(location, finding, place, kind):
    logical = {"name": "weight", "fullyQualifiedName": "a.weight", "kind": kind}
    assert location(finding(**place)) == {"logicalLocations": [logical]}


def test_a_finding_nowhere_has_no_location(rendered, finding):
    assert rendered(finding())["results"][0]["locations"] == []


def test_what_sarif_has_no_place_for_is_in_properties(rendered, finding):
    result = rendered(finding(evidence={"norm": float("inf")}, parameter="w", step=3))["results"][0]
    assert result["properties"] == {
        "fix": "Call scaler.unscale_(optimizer) first.",
        "evidence": {"norm": "Infinity"},
        "place": {"parameter": "w", "step": 3},
    }


def test_edits_are_fixes_with_replacements(rendered, finding):
    edits = [Edit(2, 1, 2, 1, "new\n"), Edit(4, 5, 5, 1, "")]
    (fix,) = rendered(finding(file="a b.py", line=2, edits=edits, safe=False))["results"][0]["fixes"]
    assert fix["description"] == {"text": "Call scaler.unscale_(optimizer) first."}
    assert fix["properties"] == {"applicability": "unsafe"}
    (change,) = fix["artifactChanges"]
    assert change["artifactLocation"] == {"uri": "a%20b.py", "uriBaseId": "%SRCROOT%"}
    assert change["replacements"] == [
        {
            "deletedRegion": {"startLine": 2, "startColumn": 1, "endLine": 2, "endColumn": 1},
            "insertedContent": {"text": "new\n"},
        },
        {
            "deletedRegion": {"startLine": 4, "startColumn": 5, "endLine": 5, "endColumn": 1},
            "insertedContent": {"text": ""},
        },
    ]
    assert "fixes" not in rendered(finding(file="a.py", line=2))["results"][0]


def test_a_cell_is_a_logical_location_and_its_edits_are_no_fix_of_the_file(rendered, finding):
    found = finding(file="a.ipynb", cell=3, line=2, column=1, edits=[Edit(2, 1, 2, 2, "x", cell=3)])
    (result,) = rendered(found)["results"]
    (place,) = result["locations"]
    assert place["physicalLocation"]["region"] == {"startLine": 2, "startColumn": 1}
    assert place["logicalLocations"] == [{"name": "cell 3", "fullyQualifiedName": "cell 3", "kind": "cell"}]
    assert result["properties"]["place"]["cell"] == 3
    assert result["properties"]["edits"] == [edit.as_dict() for edit in found.edits]
    assert "fixes" not in result


def test_a_file_that_could_not_be_checked_is_a_valid_result(validate_sarif, finding):
    unread = SimpleNamespace(path="b.py", reason="syntax error", line=None)
    log = json.loads(sarif.render([finding(file="a.py", line=1)], unread=[unread]))
    validate_sarif(log)
    run = log["runs"][0]
    assert run["tool"]["driver"]["rules"][run["results"][1]["ruleIndex"]]["id"] == run["results"][1]["ruleId"]


def test_a_place_in_the_evidence_is_a_related_location(rendered, finding):
    evidence = {"loop": {"file": "train.py", "line": 6}, "ranges": {"line": "x", "other": 1}, "count": 2}
    [related] = rendered(finding(file="a.py", line=1, evidence=evidence))["results"][0]["relatedLocations"]
    assert related["physicalLocation"]["artifactLocation"]["uri"] == "train.py"
    assert (related["physicalLocation"]["region"], related["message"]["text"]) == ({"startLine": 6}, "loop")
