import pytest

from ampwise.finding import Severity
from ampwise.report.printers.outputs import github

HELP = "%0Ahelp: Call scaler.unscale_(optimizer) first."
TITLE = "title=AMP101 clip-scaled-grads"


@pytest.mark.parametrize(
    ("severity", "command"),
    [(Severity.ERROR, "error"), (Severity.WARNING, "warning"), (Severity.INFO, "notice")],
)
def test_severities(finding, severity, command):
    assert github.render([finding("m", severity=severity)]) == f"::{command} {TITLE}::m{HELP}\n"


def test_a_span_within_a_line_has_columns(finding):
    text = github.render([finding("m", file="a.py", line=2, column=5, end_line=2, end_column=9)])
    assert text == f"::error {TITLE},file=a.py,line=2,endLine=2,col=5,endColumn=9::m{HELP}\n"


def test_a_span_over_lines_has_none(finding):
    text = github.render([finding("m", file="a.py", line=2, column=5, end_line=4, end_column=9)])
    assert text == f"::error {TITLE},file=a.py,line=2,endLine=4::m{HELP}\n"


def test_a_place_that_is_no_file_goes_into_the_message(finding):
    assert github.render([finding("m", parameter="w", step=3)]) == f"::error {TITLE}::w at step 3: m{HELP}\n"


def test_escapes(finding):
    text = github.render([finding("100%\r\n::set-env: a,b\x1b", file="a:b,c%.py", line=1)])
    assert text == (f"::error {TITLE},file=a%3Ab%2Cc%25.py,line=1::100%25%0D%0A::set-env: a,b\\x1b{HELP}\n")


def test_a_cell_is_in_the_message_and_its_line_is_not_taken_for_the_files(finding):
    text = github.render([finding("m", file="a.ipynb", cell=3, line=12, column=5, end_line=12, end_column=9)])
    assert text == f"::error {TITLE},file=a.ipynb,line=1::cell 3, line 12: m{HELP}\n"
