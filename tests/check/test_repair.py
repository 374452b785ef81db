"""Mending until nothing is left, and writing so that nothing is lost."""

import json
import os
import stat

import pytest

from ampwise.check.atomic_write import replace_file, write_script
from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_paths, check_text
from ampwise.check.source.script import UnreadableFile, read_script
from ampwise.check.verified_fixes import fix_findings


def repaired(text, path="a.py", unsafe=False):
    report, task = check_text(text, path, RuleSelection(SettingsByFolder(isolated=True)))
    repairs = fix_findings(report.findings, task, unsafe=unsafe)
    change = repairs.files.get(path)
    return (change.before.file_text(change.text) if change else text), repairs


def test_fixes_in_each_others_way_are_made_one_after_the_other(planted):
    text, repairs = repaired("bad(bad())\nbad()\n")
    assert text == "good(good())\ngood()\n"
    assert (repairs.count, repairs.notes) == (3, [])


def test_a_fix_that_brings_another_finding_is_not_made(planted):
    text, repairs = repaired("twice()\nbad()\n")
    assert text == "twice()\ngood()\n", "twice becomes bad, which is another rule's"
    assert repairs.notes == ["a.py:1:1: AMP103 not fixed: the fix would cause AMP101 (call-bad): call of bad"]
    assert repairs.count == 1


def test_bad_fixes_among_many_cost_a_few_checks(planted):
    checks = []
    planted[1].check_source = lambda code, check=planted[1].check_source: (checks.append(code), check(code))[1]
    functions = [f"def f{number}():\n    {'twice' if number % 20 == 0 else 'bad'}()\n" for number in range(200)]
    text, repairs = repaired("".join(functions))
    assert text == "".join(functions).replace("bad", "good")
    assert (repairs.count, len(repairs.notes)) == (190, 10)
    assert len(checks) < 12, "not one for each fix, nor for each bad one"


def test_what_a_fix_brings_counts_though_a_comment_suppresses_it(planted):
    text = "twice()  # noqa: AMP101\n"
    assert repaired(text)[0] == text


def test_unsafe_ones_only_when_asked(planted):
    assert repaired("risky()")[0] == "risky()"
    assert repaired("risky()", unsafe=True)[0] == "careful()"


def test_a_second_run_changes_nothing(planted):
    text, _ = repaired("bad(bad(risky()))\r\nbad()\n", unsafe=True)
    assert text == "good(good(careful()))\r\ngood()\n"
    assert repaired(text, unsafe=True)[0] == text


def test_a_fix_after_which_the_finding_is_still_there_is_not_made(planted):
    text, repairs = repaired("endless()\nx = bad()\n")
    assert text == "endless()\nx = good()\n"
    assert repairs.notes == ["a.py:1:1: AMP302 not fixed: the fix would not remove the finding"]


def test_a_rule_that_fails_is_no_proof(planted):
    """Neither before, where it was reported, nor after, where it would be the fix's doing."""
    assert repaired("bad()\ncrash()\n")[0] == "good()\ncrash()\n"
    planted[0].check_source = lambda code, check=planted[0].check_source: (
        planted[0].RULE.at(found.place, "m", edits=(code.script.edit(1, 1, 1, 4, "crash"),)) for found in check(code)
    )
    text, repairs = repaired("bad()\n")
    assert text == "bad()\n"
    assert repairs.notes == ["a.py:1:1: AMP101 not fixed: the fixed text could not be checked (RuntimeError)"]


def test_a_file_that_changed_since_it_was_checked_gets_no_edit_of_before(planted, tmp_path):
    file = tmp_path / "a.py"
    file.write_text("bad()\n")
    report, task = check_paths([str(file)], RuleSelection(SettingsByFolder(isolated=True)), jobs=1)
    file.write_text("x()\nbad()\n")
    repairs = fix_findings(report.findings, task, unsafe=False)
    assert repairs.files == {}
    assert repairs.notes == [f"{file}: not fixed: it has changed since it was checked"]


def test_a_fix_that_would_break_the_file_is_not_applied(planted, monkeypatch):
    check = planted[0].check_source
    planted[0].check_source = lambda code: (
        planted[0].RULE.at(found.place, "m", edits=(code.script.edit(1, 1, 1, 1, "def ("),)) for found in check(code)
    )
    text, repairs = repaired("bad()")
    assert text == "bad()"
    assert len(repairs.notes) == 1
    assert "a.py:1:1: AMP101 not fixed: fixing AMP101 would break the file" in repairs.notes[0]


def test_a_notebook(planted):
    text = json.dumps({"nbformat": 4, "cells": [{"cell_type": "code", "source": ["!ls\n", "bad()"]}]}, indent=1)
    mended, repairs = repaired(text, "a.ipynb")
    assert mended == text.replace("bad", "good")
    assert repairs.count == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfbad('\xc3\xa9')\r\n",
        b"# coding: latin-1\nbad('\xe9')\r",
        b"# coding: cp1252\r\nbad('\x80')\nbad()\r\n",
        b"bad()",
    ],
)
def test_files_keep_their_encoding_mark_and_line_endings(planted, tmp_path, data):
    file = tmp_path / "a.py"
    file.write_bytes(data)
    report, task = check_paths([str(file)], RuleSelection(SettingsByFolder(isolated=True)), jobs=1)
    change = fix_findings(report.findings, task, unsafe=False).files[str(file)]
    write_script(change.before, change.text)
    assert file.read_bytes() == data.replace(b"bad", b"good")


# Writing.


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script that was read in a folder where we stand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("old\n")
    return read_script("a.py")


def test_mode_and_links_are_kept_and_nothing_else_is_left(tmp_path, script):
    real, link = tmp_path / "a.py", tmp_path / "link.py"
    real.chmod(0o754)
    link.symlink_to("a.py")
    write_script(read_script("link.py"), "new\n")
    assert real.read_text() == "new\n"
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o754
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "link.py"]


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_that_leads_out_is_not_written_through(tmp_path, tmp_path_factory, script, absolute, monkeypatch):
    outside = tmp_path_factory.mktemp("elsewhere") / "b.py"
    outside.write_text("old\n")
    (tmp_path / "link.py").symlink_to(outside)
    if absolute:
        monkeypatch.chdir("/")
    path = str(tmp_path / "link.py") if absolute else "link.py"
    with pytest.raises(UnreadableFile) as caught:
        write_script(read_script(path), "new\n")
    assert caught.value.reason == (f"not written: it is a symlink out of {tmp_path}; name the real file: {outside}")
    assert outside.read_text() == "old\n"


def test_a_folder_that_is_a_link_where_we_stand_is_no_way_out(tmp_path, tmp_path_factory, script):
    outside = tmp_path_factory.mktemp("elsewhere")
    (outside / "b.py").write_text("old\n")
    (tmp_path / "sub").symlink_to(outside)
    with pytest.raises(UnreadableFile, match="it is a symlink out of"):
        write_script(read_script("sub/b.py"), "new\n")
    assert (outside / "b.py").read_text() == "old\n"


def test_where_we_stand_may_be_a_link_itself(tmp_path, tmp_path_factory, script, monkeypatch):
    here = tmp_path_factory.mktemp("links") / "here"
    here.symlink_to(tmp_path)
    monkeypatch.chdir(here)
    write_script(read_script("a.py"), "new\n")
    write_script(read_script(str(here / "a.py")), "newer\n")
    assert (tmp_path / "a.py").read_text() == "newer\n"


def test_names_that_lie_ready_for_temporary_files_are_left_alone(tmp_path, tmp_path_factory, script, monkeypatch):
    """The name cannot be guessed; and where it could, it is made anew or not at all."""
    victim = tmp_path_factory.mktemp("elsewhere") / "victim"
    victim.write_text("precious")
    (tmp_path / f".a.py.{os.getpid()}.tmp").symlink_to(victim)
    write_script(script, "new\n")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".ampwise-guessed").symlink_to(victim)
    with pytest.raises(UnreadableFile, match="cannot be written: file exists"):
        write_script(read_script("a.py"), "newer\n")
    assert ((tmp_path / "a.py").read_text(), victim.read_text()) == ("new\n", "precious")
    assert (tmp_path / ".ampwise-guessed").is_symlink(), "it is not ours to remove"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, script, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UnreadableFile, match="cannot be written: no space left on device"):
        write_script(script, "new\n")
    assert (tmp_path / "a.py").read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path, script):
    (tmp_path / "a.py").write_text("theirs\n")
    with pytest.raises(UnreadableFile, match="not written: the file has changed"):
        write_script(script, "new\n")
    assert (tmp_path / "a.py").read_text() == "theirs\n"


@pytest.mark.parametrize("change", ["write", "replace", "link", "gone"])
def test_nor_one_that_changes_while_the_new_one_is_written(tmp_path, script, monkeypatch, change):
    file, fsync = tmp_path / "a.py", os.fsync

    def slow(descriptor):
        fsync(descriptor)
        if change != "write":
            file.unlink()
        if change == "link":
            (tmp_path / "b.py").write_text("theirs\n")
            file.symlink_to("b.py")
        elif change != "gone":
            file.write_text("theirs\n")

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(UnreadableFile, match=r"not written: the file has changed|cannot be written: no such file"):
        write_script(script, "new\n")
    assert change == "gone" or file.read_text() == "theirs\n"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_file_marked_read_only_stays_as_it_is(tmp_path, script, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everything
    with pytest.raises(UnreadableFile, match="cannot be written: permission denied"):
        write_script(script, "new\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old\n"]


def test_only_plain_files_are_replaced_and_new_ones_made(tmp_path):
    replace_file(str(tmp_path / "new"), b"new")
    assert (tmp_path / "new").read_bytes() == b"new"
    (tmp_path / "link").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("link", "symbolic links"), ("pipe", "not a regular file")):
        with pytest.raises(OSError, match=reason):
            replace_file(str(tmp_path / name), b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "new", "pipe"]
