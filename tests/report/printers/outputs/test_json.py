import json

from ampwise.finding import Edit
from ampwise.report.printers.outputs import json as json_output


def rendered(finding):
    return json.loads(json_output.render([finding]))[0]


def test_the_shape_is_ruffs_with_ours_added(finding):
    place = {"file": "a.py", "line": 2, "column": 5, "end_line": 3, "end_column": 1}
    assert rendered(finding(evidence={"norm": float("nan")}, **place)) == {
        "code": "AMP101",
        "name": "clip-scaled-grads",
        "severity": "error",
        "message": "gradients are still scaled",
        "filename": "a.py",
        "cell": None,
        "noqa_row": 2,
        "location": {"row": 2, "column": 5},
        "end_location": {"row": 3, "column": 1},
        "fix": {
            "applicability": "display",
            "message": "Call scaler.unscale_(optimizer) first.",
            "edits": [],
        },
        "url": "https://github.com/ampwise/ampwise/blob/main/docs/rules/AMP101-clip-scaled-grads.md",
        "evidence": {"norm": "NaN"},
        "place": place,
    }


def test_unknowns_are_null(finding):
    nowhere = rendered(finding(parameter="w"))
    assert (nowhere["filename"], nowhere["location"], nowhere["end_location"]) == (None, None, None)
    assert rendered(finding(file="a.py", line=2))["location"] == {"row": 2, "column": None}


def test_findings_keep_the_order_they_came_in(finding):
    findings = [finding("b", file="b.py"), finding("a", file="a.py")]
    assert [one["message"] for one in json.loads(json_output.render(findings))] == ["b", "a"]


def test_edits_are_ruffs(finding):
    edits = [Edit(2, 1, 2, 3, "x"), Edit(3, 1, 3, 1, "y")]
    fix = rendered(finding(file="a.py", line=2, edits=edits))["fix"]
    assert fix["applicability"] == "safe"
    assert fix["edits"] == [
        {"content": "x", "location": {"row": 2, "column": 1}, "end_location": {"row": 2, "column": 3}},
        {"content": "y", "location": {"row": 3, "column": 1}, "end_location": {"row": 3, "column": 1}},
    ]
    assert rendered(finding(file="a.py", line=2, edits=edits, safe=False))["fix"]["applicability"] == "unsafe"


def test_a_cell_is_reported_of_the_finding_and_of_its_edits(finding):
    told = rendered(finding(file="a.ipynb", cell=3, line=2, edits=[Edit(1, 1, 1, 1, "x", cell=2)]))
    assert (told["cell"], told["noqa_row"], told["location"]["row"]) == (3, 2, 2)
    assert told["fix"]["edits"][0]["cell"] == 2
