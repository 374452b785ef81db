"""The reading order and the last line."""

import pytest

from ampwise.finding import Edit, Severity
from ampwise.report.printers.summary import in_file_order, summary


def test_files_are_walked_from_top_to_bottom_and_the_placeless_come_last_worst_first(finding):
    expected = [
        finding("1", file="a.py"),
        finding("2", file="a.py", line=2, column=9, severity=Severity.INFO),
        finding("3", file="a.py", line=10, column=1),
        finding("4", file="a.py", line=10, column=4),
        finding("5", file="b.py", line=1),
        finding("5", file="c.ipynb", cell=2, line=9),
        finding("5", file="c.ipynb", cell=10, line=1),
        finding("6", parameter="z.weight"),
        finding("7", parameter="a.weight", severity=Severity.WARNING),
    ]
    assert in_file_order(expected[::-1]) == expected


@pytest.mark.parametrize(
    ("severities", "text"),
    [
        ("", "All checks passed!"),
        ("e", "Found 1 finding (1 error)."),
        ("eww", "Found 3 findings (1 error, 2 warnings)."),
        ("iie", "Found 3 findings (1 error, 2 notes)."),
    ],
)
def test_summary(finding, severities, text):
    kinds = {"e": Severity.ERROR, "w": Severity.WARNING, "i": Severity.INFO}
    assert summary([finding(severity=kinds[letter]) for letter in severities]) == text


@pytest.mark.parametrize(
    ("safe", "last"),
    [
        ([True, True], "[*] 2 fixable with `ampwise check --fix a.py`."),
        ([True, False, False], "[*] 1 fixable with `ampwise check --fix a.py` (2 more with `--unsafe-fixes`)."),
        ([False], "1 fixable with `ampwise check --fix --unsafe-fixes a.py`."),
    ],
)
def test_the_summary_says_what_can_be_fixed(finding, safe, last):
    findings = [finding(file="a.py", line=1, edits=[Edit(1, 1, 1, 1, "x")], safe=one) for one in safe]
    assert summary([*findings, finding()]).split("\n")[1:] == [last]


def test_the_command_that_fixes_can_be_pasted(finding):
    edits = [Edit(1, 1, 1, 1, "x")]
    one, other = (finding(file=name, line=1, edits=edits) for name in ("my run.py", "b.py"))
    assert "`ampwise check --fix 'my run.py'`" in summary([one])
    assert "`ampwise check --fix`" in summary([one, other])
