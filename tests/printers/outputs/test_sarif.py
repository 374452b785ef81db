import json

import pytest

from ampwise.finding import Severity
from ampwise.printers.outputs import sarif

# Of the SARIF 2.1.0 schema: which properties an object must have, which it may have, and what lies in them.
# A name in the right column is an object; [name] is an array of them; a type is a plain value.
SCHEMA = {
    "sarifLog": ({"version": str, "runs": ["run"]}, {"$schema": str}),
    "run": ({"tool": "tool"}, {"results": ["result"], "columnKind": str}),
    "tool": ({"driver": "driver"}, {}),
    "driver": ({"name": str}, {"version": str, "rules": ["rule"]}),
    "rule": (
        {"id": str},
        {
            "name": str,
            "shortDescription": "text",
            "fullDescription": "text",
            "help": "text",
            "helpUri": str,
            "defaultConfiguration": "configuration",
        },
    ),
    "configuration": ({}, {"level": str, "enabled": bool}),
    "text": ({"text": str}, {}),
    "result": (
        {"message": "text"},
        {
            "ruleId": str,
            "ruleIndex": int,
            "level": str,
            "locations": ["location"],
            "partialFingerprints": dict,
            "properties": dict,
        },
    ),
    "location": ({}, {"physicalLocation": "physical", "logicalLocations": ["logical"]}),
    "physical": ({"artifactLocation": "artifact"}, {"region": "region"}),
    "artifact": ({"uri": str}, {"uriBaseId": str}),
    "region": ({"startLine": int}, {"startColumn": int, "endLine": int, "endColumn": int}),
    "logical": ({}, {"name": str, "fullyQualifiedName": str, "kind": str}),
}


def validate(value, kind, path="$"):
    if isinstance(kind, list):
        assert isinstance(value, list), path
        for number, part in enumerate(value):
            validate(part, kind[0], f"{path}[{number}]")
    elif isinstance(kind, str):
        required, optional = SCHEMA[kind]
        assert required.keys() <= value.keys() <= required.keys() | optional.keys(), (path, sorted(value))
        for name, part in value.items():
            validate(part, {**required, **optional}[name], f"{path}.{name}")
    else:
        assert isinstance(value, kind), (path, value)


def rendered(*findings):
    log = json.loads(sarif.render(findings))
    validate(log, "sarifLog")
    assert log["version"] == "2.1.0"
    return log["runs"][0]


def location(finding):
    (found,) = rendered(finding)["results"][0]["locations"]
    return found


def test_rules_and_results_refer_to_each_other(finding):
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


def test_a_rule_says_all_it_knows(finding):
    assert rendered(finding(severity=Severity.WARNING))["tool"]["driver"]["rules"] == [
        {
            "id": "AMP101",
            "name": "clip-scaled-grads",
            "shortDescription": {"text": "Gradients are clipped while still scaled"},
            "fullDescription": {"text": "The threshold is 65536 times too small."},
            "help": {"text": "Call scaler.unscale_(optimizer) first."},
            "defaultConfiguration": {"level": "warning", "enabled": True},
        }
    ]


def test_a_region_counts_from_one_and_has_only_what_is_known(finding):
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
def test_uris(finding, file, artifact):
    assert location(finding(file=file))["physicalLocation"]["artifactLocation"] == artifact


@pytest.mark.parametrize(
    ("place", "kind"), [({"parameter": "a.weight"}, "parameter"), ({"module": "a.weight"}, "module")]
)
def test_a_finding_without_a_file_has_a_logical_location_only(finding, place, kind):
    logical = {"name": "weight", "fullyQualifiedName": "a.weight", "kind": kind}
    assert location(finding(**place)) == {"logicalLocations": [logical]}


def test_a_finding_nowhere_has_no_location(finding):
    assert rendered(finding())["results"][0]["locations"] == []


def test_what_sarif_has_no_place_for_is_in_properties(finding):
    result = rendered(finding(evidence={"norm": float("inf")}, parameter="w", step=3))["results"][0]
    assert result["properties"] == {
        "fix": "Call scaler.unscale_(optimizer) first.",
        "evidence": {"norm": "Infinity"},
        "place": {"parameter": "w", "step": 3},
    }
