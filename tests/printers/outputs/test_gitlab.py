import json

from ampwise.finding import Severity
from ampwise.printers.outputs import gitlab


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
