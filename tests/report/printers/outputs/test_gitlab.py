import json

from ampwise.finding import Severity
from ampwise.report.printers.outputs import gitlab


def rendered(*findings):
    return json.loads(gitlab.render(findings))


def test_what_gitlab_demands(finding):
    (issue,) = rendered(finding(file="a.py", line=2, end_line=4, end_column=1))
    assert len(issue.pop("fingerprint")) == 40
    assert issue == {
        "description": "AMP101: gradients are still scaled",
        "check_name": "clip-scaled-grads",
        "severity": "critical",
        "location": {"path": "a.py", "lines": {"begin": 2, "end": 4}},
    }


def test_severities_are_gitlabs(finding):
    issues = rendered(*(finding(severity=severity) for severity in Severity))
    assert [issue["severity"] for issue in issues] == ["critical", "major", "info"]


def test_a_place_that_is_no_file_is_kept(finding):
    (issue,) = rendered(finding(parameter="w", step=3))
    assert issue["location"] == {"path": "w at step 3", "lines": {"begin": 1, "end": 1}}


def test_a_cell_is_in_the_description_and_its_line_is_not_taken_for_the_files(finding):
    (issue,) = rendered(finding("m", file="a.ipynb", cell=3, line=12))
    assert issue["description"] == "AMP101: cell 3, line 12: m"
    assert issue["location"] == {"path": "a.ipynb", "lines": {"begin": 1, "end": 1}}


def test_a_finding_in_a_cell_that_moved_keeps_its_fingerprint(finding):
    issues = [
        *rendered(finding("see cell 1", file="a.ipynb", cell=3)),
        *rendered(finding("see cell 2", file="a.ipynb", cell=4)),
    ]
    assert len({issue["fingerprint"] for issue in issues}) == 1
