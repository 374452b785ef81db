"""Paths from the root of the checkout, and fingerprints that outlive an edit above the finding."""

import pytest

from ampwise.report.printers.fingerprint import fingerprints, project_path


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_are_relative_to_where_we_are(checkout):
    assert project_path("train.py") == "train.py"
    assert project_path(str(checkout / "sub" / "train.py")) == "sub/train.py"
    assert project_path("sub/../train.py") == "train.py"
    assert project_path("/elsewhere/train.py") == "/elsewhere/train.py"


@pytest.mark.parametrize("variable", ["GITHUB_WORKSPACE", "CI_PROJECT_DIR"])
def test_paths_in_ci_are_relative_to_the_checkout(checkout, monkeypatch, variable):
    monkeypatch.setenv(variable, str(checkout))
    monkeypatch.chdir(checkout / "sub")
    assert project_path("train.py") == "sub/train.py"
    assert project_path("../train.py") == "train.py"


def test_a_fingerprint_survives_moved_lines(finding):
    before = [finding("scaled at line 4", file="a.py", line=9, column=1), finding(file="a.py", line=20)]
    after = [finding("scaled at line 7", file="a.py", line=12, column=5), finding(file="a.py", line=23)]
    assert fingerprints(before) == fingerprints(after)


def test_fingerprints_tell_findings_apart(finding):
    different = [
        finding(file="a.py", line=1),
        finding(file="a.py", line=2),
        finding(file="b.py", line=1),
        finding("another", file="a.py", line=1),
        finding(code="AMP102", file="a.py", line=1),
        finding(parameter="w"),
        finding(module="w"),
        finding(device="w"),
    ]
    assert len(set(fingerprints(different))) == len(different)


def test_a_finding_in_another_file_changes_no_fingerprint(finding):
    alone = fingerprints([finding(file="b.py", line=1)])
    assert fingerprints([finding(file="a.py", line=1), finding(file="b.py", line=1)])[1:] == alone
