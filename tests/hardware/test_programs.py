"""Programs of others are never those of the current folder."""

import os

import pytest

from ampwise.hardware.programs import absolute_parts, find_program, open_in_browser


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A current folder, and one of programs, each with a browser in it that says whose it is."""
    for folder in ("current", "programs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "fake-browser").write_text(f"#!/bin/sh\necho {folder} >> {tmp_path}/opened\n")
        (tmp_path / folder / "fake-browser").chmod(0o755)
    monkeypatch.chdir(tmp_path / "current")
    return tmp_path


@pytest.mark.parametrize("path", ["", ":", ".", "..", "../current", "current:"])
def test_a_part_that_is_relative_is_not_searched(planted, monkeypatch, path):
    monkeypatch.setenv("PATH", path)
    assert find_program("fake-browser") is None
    monkeypatch.setenv("PATH", f"{path}:{planted}/programs")
    assert find_program("fake-browser") == f"{planted}/programs/fake-browser"
    assert find_program("./fake-browser") == "./fake-browser"  # who names a file means it


def test_a_folder_can_be_left_out_by_any_of_its_names(planted):
    (planted / "link").symlink_to(planted / "current")
    (planted / "currently").mkdir()
    parts = [f"{planted}/{name}" for name in ("current", "current/bin", "link", "programs/../current", "currently")]
    assert absolute_parts(os.pathsep.join(parts), outside=f"{planted}/current") == f"{planted}/currently"


def test_a_browser_is_looked_for_elsewhere(planted, monkeypatch):
    import webbrowser

    monkeypatch.setattr(webbrowser, "_tryorder", None)
    monkeypatch.setattr(webbrowser, "_browsers", {})
    monkeypatch.setenv("BROWSER", "fake-browser")
    monkeypatch.setenv("PATH", f":.:{planted}/programs:/usr/bin:/bin")
    assert open_in_browser("file:///x.html")
    assert (planted / "opened").read_text() == "programs\n"
