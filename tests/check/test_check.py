"""The driver: what is reported, whatever the files and the rules do."""

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check import linter as check
from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import CheckTask, RuleSelection, check_paths, check_share, check_text, split_into_shares
from ampwise.check.selectors import SelectorLayer
from ampwise.check.source import project
from ampwise.check.source.script import UnreadableFile
from ampwise.errors import UnknownName


@pytest.fixture
def folder(tmp_path, monkeypatch, planted):
    monkeypatch.chdir(tmp_path)

    def write(files):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


def run(*paths, jobs=1, **said):
    return check_paths(paths or ["."], RuleSelection(SettingsByFolder(), SelectorLayer(**said)), jobs=jobs)[0]


def told(report):
    return [f"{finding.place}: {finding.rule.code}" for finding in report.findings]


def test_findings_come_by_file_and_line(folder):
    folder({"b.py": "bad()\nplain()\n", "a.py": "plain(bad())\n", "c/d.py": "x\n"})
    report = run()
    assert told(report) == ["a.py:1:1: AMP201", "a.py:1:7: AMP101", "b.py:1:1: AMP101", "b.py:2:1: AMP201"]
    assert report.files_checked == 3


def test_what_cannot_be_read_does_not_stop_the_rest(folder):
    folder({"a.py": "bad()", "b.py": "def (", "c.py": b"\xff", "d.ipynb": "{", "docs/x.md": "", "e.py": b"\0"})
    report = run(".", "gone.py", "docs")
    assert told(report) == ["a.py:1:1: AMP101"]
    assert report.files_checked == 1
    assert [error.path for error in report.unreadable] == ["b.py", "c.py", "d.ipynb", "e.py", "gone.py"]
    assert report.notes == ["docs: no Python file or notebook in this folder"]


def test_a_rule_that_fails_costs_a_line(folder, monkeypatch):
    folder({"a.py": "crash()\nbad()\n", "b.py": "bad()\n"})
    report = run()
    assert told(report) == ["a.py:2:1: AMP101", "b.py:1:1: AMP101"]
    assert report.notes == [
        "a.py: internal error in AMP301: RuntimeError: planted; please report it (AMPWISE_DEBUG=1 shows the traceback)"
    ]
    assert report.files_checked == 2
    monkeypatch.setenv("AMPWISE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="planted"):
        run()


def test_a_reader_that_fails_costs_a_line(folder, monkeypatch):
    folder({"a.py": "bad()"})

    def fail(*_):
        raise RecursionError("too deep")

    monkeypatch.setattr("ampwise.check.source.project.Project.code", fail)
    report = run()
    assert [error.reason.partition(";")[0] for error in report.unreadable] == [
        "internal error in reading it: RecursionError: too deep"
    ]


def test_the_settings_of_each_folder_and_then_the_command_line(folder):
    folder(
        {
            "a/x.py": "bad(); plain(); quiet()",
            "a/pyproject.toml": '[tool.ampwise]\nignore = ["AMP1"]\nper-file-ignores = {"y.py" = ["ALL"]}\n',
            "a/y.py": "bad(); plain()",
            "b/x.py": "bad(); plain(); quiet()",
        }
    )
    assert told(run()) == ["a/x.py:1:8: AMP201", "b/x.py:1:1: AMP101", "b/x.py:1:8: AMP201"]
    assert told(run(extend_select=("AMP202",), ignore=("call-plain",))) == [
        "a/x.py:1:17: AMP202",
        "b/x.py:1:1: AMP101",
        "b/x.py:1:17: AMP202",
    ]
    assert told(run(select=("AMP101",))) == ["a/x.py:1:1: AMP101", "b/x.py:1:1: AMP101"]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ('select = ["AMP9"]', r"in \S*ampwise.toml 'AMP9'"),
        ('per-file-ignores = {"z.py" = ["AMP9"]}', r"in \S*ampwise.toml \(per-file-ignores\) 'AMP9'"),
    ],
)
def test_a_selector_in_the_settings_that_means_nothing_is_said(folder, monkeypatch, settings, where):
    monkeypatch.setattr("ampwise.finding.registry.all_rules", list)
    folder({"a.py": "bad()", "ampwise.toml": settings})
    with pytest.raises(UnknownName, match=f"unknown rule selector {where}"):
        run()


def test_comments_suppress(folder):
    folder({"a.py": "bad()  # noqa: AMP101\nbad()\n", "b.py": "# ampwise: noqa\nbad()\n"})
    assert told(run()) == ["a.py:2:1: AMP101"]


def test_the_same_finding_twice_is_one(folder, planted):
    planted.append(planted[0])
    folder({"a.py": "bad()"})
    assert told(run()) == ["a.py:1:1: AMP101"]


def test_a_cell_left_out_is_said(folder):
    cells = [{"cell_type": "code", "source": source} for source in ("def (", "bad()")]
    folder({"a.ipynb": json.dumps({"nbformat": 4, "cells": cells})})
    report = run()
    assert told(report) == ["a.ipynb:cell 2:1:1: AMP101"]
    assert report.notes == ["a.ipynb: cell 1 was not checked: syntax error at line 1: invalid syntax"]


def test_text_that_is_not_on_disk(folder):
    folder({})
    report, _ = check_text("bad()", "new.py", RuleSelection(SettingsByFolder()))
    assert told(report) == ["new.py:1:1: AMP101"]


def test_in_a_tree_files_without_the_words_are_counted_and_not_parsed(folder, planted, monkeypatch):
    for module in planted:
        module.NEEDS = (("bad", "worse"),)
    folder({"a.py": "bad()", "b.py": "good()", "c.py": "def ("})
    monkeypatch.setattr(check, "FEW_FILES", 0)
    report = run()
    assert (told(report), report.files_checked, report.unreadable) == (["a.py:1:1: AMP101"], 3, [])


def test_processes_report_what_one_process_does(folder, monkeypatch):
    """Law: the report does not depend on how the work is shared."""
    files = {f"{number % 3}/m{number}.py": "bad()\n" * (number + 1) for number in range(9)}
    folder({**files, "0/broken.py": "def (", "1/crash.py": "crash()"})
    alone = run()
    monkeypatch.setattr(check, "WORTH_PROCESSES", 0)
    for jobs in (2, 5):
        report = run(jobs=jobs)
        assert told(report) == told(alone)
        assert report.files_checked == alone.files_checked
        assert sorted(report.notes) == sorted(alone.notes)
        assert [str(error) for error in report.unreadable] == [str(error) for error in alone.unreadable]


def test_a_process_that_dies_costs_only_its_files(folder, monkeypatch, planted):
    def die(evidence):
        if evidence.path.endswith("deadly.py") and os.getpid() != parent:
            os._exit(9)
        return iter(())

    parent = os.getpid()
    planted[-1].check_source = die
    folder({"a/x.py": "bad()", "b/deadly.py": "bad()", "c/y.py": "bad()", "d/z.py": "bad()"})
    monkeypatch.setattr(check, "WORTH_PROCESSES", 0)
    report = run(jobs=2)
    assert told(report) == [f"{path}:1:1: AMP101" for path in ("a/x.py", "c/y.py", "d/z.py")]
    assert [str(error) for error in report.unreadable] == ["b/deadly.py: the process that read it died"]


def test_a_report_crosses_processes(folder):
    folder({"a.py": "bad()"})
    report = run()
    assert pickle.loads(pickle.dumps(report.findings)) == report.findings


SIZES = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")).map("/".join), st.integers(0, 100), max_size=9
)


@given(SIZES, st.integers(1, 20))
def test_shares_are_all_files_once_in_order(sizes, number):
    ordered = dict(sorted(sizes.items()))
    parts = split_into_shares(ordered, number)
    assert [path for part in parts for path in part] == list(ordered)
    assert all(parts)


def test_shares_are_balanced_and_end_with_folders():
    sizes = {f"{folder:02}/{file}.py": 10 for folder in range(20) for file in range(5)}
    parts = split_into_shares(sizes, 8)
    assert 5 <= len(parts) <= 20
    owners = [{Path(path).parent for path in part} for part in parts]
    assert sum(map(len, owners)) == 20, "no folder is split"


def test_unreadable_is_an_error_on_purpose():
    from ampwise.errors import AmpwiseError

    assert issubclass(UnreadableFile, AmpwiseError)


def test_what_is_reported_does_not_depend_on_which_process_was_first(tmp_path, planted, monkeypatch):
    for number in range(6):
        (tmp_path / f"{number}.py").write_text("crash()" if number % 2 else "def (")

    def backwards(task, sizes, jobs):
        parts = [CheckTask(task.project_paths, {path: codes}) for path, codes in task.codes.items()]
        return [check_share(part) for part in reversed(parts)]

    monkeypatch.setattr("ampwise.check.linter.WORTH_PROCESSES", 0)
    alone, _ = check_paths([str(tmp_path)], RuleSelection(SettingsByFolder(isolated=True)), jobs=1)
    monkeypatch.setattr("ampwise.check.linter._shared_reports", backwards)
    shared, _ = check_paths([str(tmp_path)], RuleSelection(SettingsByFolder(isolated=True)), jobs=2)
    assert [error.path for error in shared.unreadable] == [error.path for error in alone.unreadable]
    assert len(shared.unreadable) == len(shared.notes) == len(shared.partly) == 3
    assert (shared.notes, shared.partly) == (alone.notes, alone.partly)


TRAIN = """import torch
from helper import clip

scaler = torch.amp.GradScaler("cuda")  # for models that autocast by themselves
for x in data:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    clip(model)
    scaler.step(optimizer)
    scaler.update()
"""
HELPER = "import torch\n\ndef clip(model):\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"


@pytest.mark.parametrize("few", [0, 50], ids=["among many files", "among few"])
def test_a_mistake_may_lie_in_a_file_that_has_not_the_words_for_it(tmp_path, monkeypatch, few):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ampwise.check.linter.FEW_FILES", few)
    Path("train.py").write_text(TRAIN)
    Path("helper.py").write_text(HELPER)
    assert told(run()) == ["helper.py:4:5: AMP101"]
    assert told(run(ignore=("AMP101",))) == []
    Path("helper.py").write_text(HELPER.rstrip() + "  # noqa: AMP101\n")
    assert told(run()) == []
    Path("helper.py").write_text(HELPER)
    Path("ampwise.toml").write_text('per-file-ignores = {"helper.py" = ["AMP101"]}')
    assert told(run()) == []


def test_a_process_reads_what_its_shares_import_once(tmp_path, monkeypatch, planted):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        Path(f"{name}.py").write_text("bad()")
    made = []

    class Counted(project.Project):
        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(project, "Project", Counted)
    paths = ("a.py", "b.py", "c.py")
    for path in paths:
        assert told(check_share(CheckTask(paths, {path: frozenset({"AMP101"})}))) == [f"{path}:1:1: AMP101"]
    assert len(made) == 1


def test_a_pipe_or_a_huge_file_beside_a_training_script_is_passed_over(folder, tmp_path):
    """Also where others' imports are looked up: a pipe would never end, and a hole of a terabyte fits no memory."""
    folder({"train.py": "import huge, pipe\nscaler.scale(loss).backward()\n"})
    os.mkfifo(tmp_path / "pipe.py")
    with (tmp_path / "huge.py").open("wb") as huge:
        huge.truncate(2**40)
    report = run("train.py", "pipe.py", "huge.py")
    assert [str(each) for each in report.unreadable] == [
        "huge.py: larger than 5 MB, which is too large to check",
        "pipe.py: not a file",
    ]


STEPS = """
import torch

def clip(model, scaler, optimizer):
    {unscale}torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
"""
TWICE = """
from torch.amp import GradScaler
{imports}

def train(model, optimizer, loader):
    scaler = GradScaler("cuda")  # for models that autocast by themselves
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(model(x, y)).backward()
        clip(model, scaler, optimizer)
        scaler.unscale_(optimizer)  # where `clip` does it, too, an error
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    ("path", "helper", "imports"),
    [
        ("train.py", "steps.py", "from steps import clip"),
        ("tools/train.py", "lab/steps.py", "from lab.steps import clip"),
        ("lab/train.py", "lab/steps.py", "from .steps import clip"),
        ("lab/run/train.py", "lab/steps.py", "from ..steps import (\n    clip,\n)"),
        ("tools/train.py", "lab/steps.py", "from lab import clip"),
    ],
)
def test_a_file_given_by_name_is_read_with_what_it_imports(tmp_path, monkeypatch, path, helper, imports, absolute):
    monkeypatch.chdir(tmp_path)
    for each in ("tools", "lab/run"):
        Path(each).mkdir(parents=True)
    Path("lab/__init__.py").write_text("from .steps import clip\n" if helper == "lab/steps.py" else "")
    Path(path).write_text(TWICE.format(imports=imports))
    Path(helper).write_text(STEPS.format(unscale="scaler.unscale_(optimizer); "))
    given = str(tmp_path / path) if absolute else path
    assert [finding.rule.code for finding in run(given).findings] == ["AMP103"]
    assert run(given).files_checked == 1
    Path(helper).write_text(STEPS.format(unscale=""))  # clips too early
    (finding,) = run(given).findings  # shown where it is called
    line = Path(path).read_text().split("\n").index("        clip(model, scaler, optimizer)") + 1
    where = tmp_path / helper if absolute else helper
    assert (finding.rule.code, finding.place.file, finding.place.line) == ("AMP101", given, line)
    assert finding.message.endswith(f"from line {line - 1} (in {where}:5:5)")
    assert finding.edits == ()
    assert told(run(path, helper)) == [f"{helper}:5:5: AMP101"]


def test_a_mistake_in_an_imported_file_is_shown_where_that_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("keep.py").write_text(
        "import torch\n\ndef save(path, optimizer, **more):\n"
        "    torch.save({'optimizer': optimizer.state_dict(), 'more': 1, **more}, path)\n"
    )
    train = TWICE.format(imports="from keep import save").replace("        clip(model, scaler, optimizer)\n", "")
    Path("train.py").write_text(train + "    save('last.pt', optimizer)\n")
    assert told(run("train.py")) == ["train.py:13:5: AMP204"]
    assert told(run("train.py", "keep.py")) == ["keep.py:4:16: AMP204"]
    Path("train.py").write_text(train + "    save('last.pt', optimizer, scaler=scaler.state_dict())\n")
    assert told(run("train.py")) == []


def test_imports_that_lead_nowhere_are_passed_over(tmp_path, monkeypatch):
    """Also a module that imports itself, a link out of the folder, a pipe, and more dots than there are folders."""
    monkeypatch.chdir(tmp_path)
    Path("outside").mkdir()
    Path("outside/steps.py").write_text(STEPS.format(unscale="scaler.unscale_(optimizer); "))
    Path("inside").mkdir()
    Path("inside/steps.py").symlink_to(tmp_path / "outside/steps.py")
    os.mkfifo("inside/pipe.py")
    imports = "import train, pipe, torch.nn, nowhere\nfrom ....... import up\nfrom steps import clip"
    Path("inside/train.py").write_text(TWICE.format(imports=imports))
    monkeypatch.chdir("inside")
    report = run("train.py")
    assert (report.findings, report.notes, report.unreadable) == ([], [], [])
