"""Mending until nothing is left, and writing so that nothing is lost."""

import json
import os
import stat

import pytest

from ampwise.lint.check import Choice, check_paths, check_text
from ampwise.lint.config import Configs
from ampwise.lint.repair import repair
from ampwise.lint.write import write_file, write_script
from ampwise.source.script import Unreadable, read_script


def repaired(text, path="a.py", unsafe=False):
    report, task = check_text(text, path, Choice(Configs(isolated=True)))
    repairs = repair(report.findings, task, unsafe=unsafe)
    change = repairs.files.get(path)
    return (change.before.file_text(change.text) if change else text), repairs


def test_mends_are_made_until_there_are_none(planted):
    text, repairs = repaired("twice(bad())  # twice\n")
    assert text == "good(good())  # twice\n", "twice became bad, and that in turn good"
    assert (repairs.count, repairs.notes) == (3, [])


def test_unsafe_ones_only_when_asked(planted):
    assert repaired("risky()")[0] == "risky()"
    assert repaired("risky()", unsafe=True)[0] == "careful()"


def test_a_second_run_changes_nothing(planted):
    text, _ = repaired("bad(twice(risky()))\r\nbad()\n", unsafe=True)
    assert text == "good(good(careful()))\r\ngood()\n"
    assert repaired(text, unsafe=True)[0] == text


def test_mends_without_an_end_are_stopped_and_said(planted):
    _, repairs = repaired("endless()")
    assert repairs.notes == ["a.py: mended 10 times without an end; please report it"]


def test_a_mend_that_would_spoil_the_file_is_not_made(planted, monkeypatch):
    check = planted[0].check
    planted[0].check = lambda code: (
        planted[0].RULE.at(found.place, "m", edits=(code.script.edit(1, 1, 1, 1, "def ("),)) for found in check(code)
    )
    text, repairs = repaired("bad()")
    assert text == "bad()"
    assert len(repairs.notes) == 1
    assert "a.py: mending AMP101 would have spoiled the file" in repairs.notes[0]


def test_a_notebook(planted):
    text = json.dumps({"nbformat": 4, "cells": [{"cell_type": "code", "source": ["!ls\n", "twice()"]}]}, indent=1)
    mended, repairs = repaired(text, "a.ipynb")
    assert mended == text.replace("twice", "good")
    assert repairs.count == 2


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfbad('\xc3\xa9')\r\n",
        b"# coding: latin-1\ntwice('\xe9')\r",
        b"# coding: cp1252\r\nbad('\x80')\ntwice()\r\n",
    ],
)
def test_files_keep_their_encoding_mark_and_line_endings(planted, tmp_path, data):
    file = tmp_path / "a.py"
    file.write_bytes(data)
    report, task = check_paths([str(file)], Choice(Configs(isolated=True)), jobs=1)
    change = repair(report.findings, task, unsafe=False).files[str(file)]
    write_script(change.before, change.text)
    assert file.read_bytes() == data.replace(b"bad", b"good").replace(b"twice", b"good")


# Writing.


def test_mode_and_links_are_kept_and_nothing_else_is_left(tmp_path):
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    real.chmod(0o754)
    link.symlink_to(real)
    write_file(str(link), b"new")
    assert real.read_text() == "new"
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o754
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "real.py"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.py"
    file.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(Unreadable, match="cannot be written: no space left on device"):
        write_file(str(file), b"new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("a\n")
    script = read_script(str(file))
    file.write_text("b\n")
    with pytest.raises(Unreadable, match="not written: it has changed"):
        write_script(script, "c\n")
    assert file.read_text() == "b\n"


def test_a_file_marked_read_only_stays_as_it_is(tmp_path, monkeypatch):
    file = tmp_path / "a.py"
    file.write_bytes(b"old")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everything
    with pytest.raises(Unreadable, match="cannot be written: permission denied"):
        write_file(str(file), b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
