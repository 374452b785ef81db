import json

from ampwise.printers.outputs import json as json_output


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
        "location": {"row": 2, "column": 5},
        "end_location": {"row": 3, "column": 1},
        "fix": {
            "applicability": "display",
            "message": "Call scaler.unscale_(optimizer) first.",
            "edits": [],
        },
        "url": None,
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
