"""`ampwise mcp`: what agents can ask, what they cannot reach, and that only the protocol is on stdout."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import select
import signal
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.cli import commands, main
from ampwise.errors import BadInput, MissingDependency
from ampwise.integrations import mcp_process, mcp_server, mcp_worker
from ampwise.integrations.mcp_process import BoundedOutput, CommandResult, launch
from ampwise.integrations.mcp_server import (
    COMMAND_OF_TOOL,
    FIRST,
    LONGEST,
    MAY_LOAD,
    MOST_FINDINGS,
    NEEDS_ALLOW_RUN,
    READS_ONLY,
    TOO_LATE,
    AgentTools,
    make_server,
    need_mcp,
)
from ampwise.integrations.mcp_worker import AgentFolder

pytest.importorskip("mcp")
import anyio
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

ROOT = Path(__file__).parents[2]
TOOLS = ("check", "fix", "explain", "advise", "memory", "formats", "gpu", "replay", "read_report")
BAD = """\
import torch
from torch.nn.utils import clip_grad_norm_

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "110")


@pytest.fixture
def project(tmp_path):
    """A folder with a bad script, and beside it what nobody in it may see."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(BAD)
    (tmp_path / "secret.py").write_text(BAD)
    return folder


async def in_process(words, *, cwd, seconds, text=None):
    """A command as ``launch`` runs it, without the time that a process takes."""
    words = AgentFolder(cwd).words(words)
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO((text or "").encode()))
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", stdin),
    ):
        try:
            code = main(words)
        except SystemExit as leaving:
            code = leaving.code
    return CommandResult(code=code, out=out.getvalue(), err=err.getvalue())


class Recorder:
    """Remembers the command lines, and answers as told."""

    def __init__(self, code=0, out="", err=""):
        self.asked, self.ended = [], CommandResult(code=code, out=out, err=err)

    async def __call__(self, words, *, cwd, seconds, text=None):
        self.asked.append(AgentFolder(cwd).words(words))
        return self.ended


def call(folder, tool, arguments=None, *, allow_run=False, run_command=in_process):
    """What a client of the SDK gets: whether it is an error, and the text."""

    async def ask():
        server = make_server(AgentFolder(folder), allow_run=allow_run, run_command=run_command)
        async with Client(server) as client:
            return await client.call_tool(tool, arguments or {})

    answer = anyio.run(ask)
    (content,) = answer.content
    return answer.is_error, content.text


def refused(folder, tool, arguments, **options):
    is_error, text = call(folder, tool, arguments, **options)
    assert is_error
    assert "\n" not in text
    return text


def listed(folder, **options):
    async def ask():
        async with Client(make_server(AgentFolder(folder), **options)) as client:
            return (await client.list_tools()).tools

    return {tool.name: tool for tool in anyio.run(ask)}


# --- the tools


def test_the_tools_and_what_they_say_of_themselves(project):
    tools = listed(project)
    assert tuple(tools) == TOOLS
    with_run = listed(project, allow_run=True)
    assert tuple(with_run) == (*TOOLS, *NEEDS_ALLOW_RUN)
    assert not any(with_run[name].annotations.read_only_hint for name in (*MAY_LOAD, *NEEDS_ALLOW_RUN))
    for name, tool in tools.items():
        assert COMMAND_OF_TOOL.get(name, name) in commands()
        assert tool.annotations.read_only_hint == (name in READS_ONLY)
    for name, tool in with_run.items():
        assert len(tool.description) <= 240, f"{name}: more than three lines"
        parameters = set(inspect.signature(getattr(AgentTools, name)).parameters) - {"self"}
        assert set(tool.input_schema["properties"]) == parameters, f"{name} does not say what each parameter is"
        for parameter in tool.input_schema["properties"].values():
            assert "type" in parameter
            assert parameter["description"]
            assert "title" not in parameter
    paid = sum(len(json.dumps(tool.model_dump(mode="json", exclude_none=True))) for tool in with_run.values())
    assert paid < 8_000, f"an agent pays for {paid} characters before it asks anything"


def test_check_says_what_is_wrong_and_writes_nothing(project):
    (project / "pyproject.toml").write_text("[tool.ampwise]\nfix = true\n")
    is_error, text = call(project, "check")
    assert is_error
    assert "fix is not a setting; use it on the command line: ampwise check --fix" in text
    (project / "pyproject.toml").unlink()
    is_error, text = call(project, "check")
    answer = json.loads(text)
    assert not is_error
    assert "left_out" not in answer
    assert [(each["code"], each["file"], each["line"], each["fixable"]) for each in answer["findings"]] == [
        ("AMP101", "train.py", 10, "yes")
    ]
    assert (project / "train.py").read_text() == BAD


def test_check_takes_text_that_is_no_file_yet(project):
    good = BAD.replace("    clip_grad", "    scaler.unscale_(optimizer)\n    clip_grad")
    codes = [
        [found["code"] for found in json.loads(call(project, "check", {"text": text})[1])["findings"]]
        for text in (BAD, good)
    ]
    assert codes == [["AMP101"], []]
    assert not json.loads(call(project, "check", {"text": BAD, "ignore": "AMP1"})[1])["findings"]


def test_what_the_settings_exclude_is_not_checked(project):
    (project / "pyproject.toml").write_text('[tool.ampwise]\nextend-exclude = ["old"]\n')
    (project / "old").mkdir()
    (project / "old" / "train.py").write_text(BAD)
    found = json.loads(call(project, "check")[1])["findings"]
    assert [each["file"] for each in found] == ["train.py"]


def test_what_is_named_is_checked_or_refused_but_never_passed_over(project):
    # An empty list of findings would say that it is clean.
    (project / "build").mkdir()
    (project / "build" / "train.py").write_text(BAD)

    def files(paths):
        found = json.loads(call(project, "check", {"paths": paths})[1])["findings"]
        return [each["file"] for each in found]

    assert files(["build/train.py"]) == files(["build"]) == ["build/train.py"]
    assert files(["."]) == ["train.py"]
    (project / "pyproject.toml").write_text('[tool.ampwise]\nextend-exclude = ["old"]\n')
    assert "that is not excluded" in refused(project, "check", {"paths": ["build"]})
    assert files(["build/train.py"]) == ["build/train.py"]


def test_fix_is_a_diff_unless_asked_to_write(project):
    is_error, text = call(project, "fix", {"paths": ["train.py"]})
    assert not is_error
    assert "+    scaler.unscale_(optimizer)" in text
    assert (project / "train.py").read_text() == BAD
    written = call(project, "fix", {"paths": ["train.py"], "write": True})[1]
    assert written.splitlines()[:2] == ["written", "0 findings remain"]
    assert "scaler.unscale_(optimizer)" in (project / "train.py").read_text()
    assert call(project, "fix", {"write": True})[1] == "nothing to fix\n"


def test_answers_are_those_of_the_commands(project):
    assert call(project, "explain", {"rule": "amp101"})[1].startswith("AMP101 clip-scaled-grads (error)")
    assert json.loads(call(project, "formats", {"names": ["half"]})[1])[0]["max"] == 65504
    assert json.loads(call(project, "gpu", {"name": "h200"})[1])["id"] == "h200"
    advice = json.loads(call(project, "advise", {"gpu": "v100-sxm2-16", "want": "bf16"})[1])
    assert (advice["precision"], advice["refused"]) == ("fp16", True)
    proposed = json.loads(call(project, "advise", {"gpu": "8.6", "ideas": ["autocast-off", "no-scaler"]})[1])
    assert {each["code"] for each in proposed["findings"]} == {"AMP705", "AMP301"}


def test_errors_are_one_line(project):
    assert refused(project, "explain", {"rule": "AMP1O1"}).startswith("unknown rule 'AMP1O1'. Did you mean AMP")
    assert "unknown" in refused(project, "advise", {"gpu": "h2000"})
    assert refused(project, "explain", {"rule": "--help"}) == (
        "'--help': expected a name of at most 200 printable characters that does not start with '-'."
    )
    assert "Input should be a valid string" in refused(project, "explain", {"rule": 3})
    crashed = Recorder(code=1, err="Traceback (most recent call last):\n  x\nKeyError: 'loss'\n")
    assert refused(project, "formats", {}, run_command=crashed) == "KeyError: 'loss'"
    assert refused(project, "formats", {}, run_command=Recorder(code=-9)) == "exited with code -9 and no message"


def test_a_size_needs_no_code(project):
    asked = Recorder(out="{}")
    call(project, "memory", {"params": "7B", "gpu": "h200", "checkpointing": True}, run_command=asked)
    assert asked.asked == [["memory", "--json", "-q", "--params=7B", "--gpu=h200", "--checkpointing"]]


def test_numbers_may_be_numbers(project):
    asked = Recorder(out="{}")
    call(project, "memory", {"params": 7_000_000_000, "batch": 16}, run_command=asked)
    call(project, "advise", {"gpu": 9.0, "params": "7B"}, run_command=asked)
    assert asked.asked == [
        ["memory", "--json", "-q", "--params=7000000000", "--batch=16"],
        ["advise", "--json", "--gpu=9.0", "--params=7B"],
    ]


def test_a_zero_is_reported_to_the_command(project):
    asked = Recorder(out="{}")
    call(project, "memory", {"layers": 0, "fsdp": 0}, run_command=asked)
    call(project, "advise", {"gpu": "", "measured": 0.0}, run_command=asked)
    assert asked.asked == [["memory", "--json", "-q", "--layers=0", "--fsdp=0"], ["advise", "--json", "--measured=0.0"]]


def test_answers_are_bounded(project):
    found = [
        {
            "code": "AMP101",
            "name": "x",
            "severity": "error",
            "message": "m" * size,
            "filename": "f",
            "cell": None,
            "location": None,
            "fix": {"message": "f", "applicability": "display"},
        }
        for size in [5] * 300 + [3000] * 300
    ]
    for some in (found, found[300:]):
        text = call(project, "check", run_command=Recorder(out=json.dumps(some)))[1]
        answer = json.loads(text)
        assert len(text) < 1.5 * LONGEST
        assert len(answer["findings"]) <= MOST_FINDINGS
        assert answer["left_out"] == len(some) - len(answer["findings"])
        assert "\n" not in text.rstrip("\n")
    long = call(project, "formats", run_command=Recorder(out="x" * (LONGEST + 7)))[1]
    assert long.endswith("[... 7 characters left out: ask for less]")
    cut = Recorder(out="[{]\n[... 9 bytes left out ...]\n}")
    assert refused(project, "check", {}, run_command=cut).startswith("too many findings to show")


# --- what runs code


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("replay", {"capsule": "capsules/step-000012", "make": "train:make"}),
        ("advise", {"make": "train:make"}),
        ("memory", {"make": "train:make"}),
    ],
)
def test_without_allow_run_no_code_is_loaded(project, tool, arguments):
    asked = Recorder()
    assert "started without --allow-run" in refused(project, tool, arguments, run_command=asked)
    assert asked.asked == []


def test_without_allow_run_there_is_no_run(project):
    assert call(project, "run", {"script": "train.py"}) == (True, "Unknown tool: run")


def test_with_allow_run_it_is(project):
    (project / "capsule").mkdir()
    asked = Recorder(out="told\n", err="ampwise: summary\n")

    def given_to(tool, arguments):
        return call(project, tool, arguments, allow_run=True, run_command=asked)[1]

    assert given_to("replay", {"capsule": "capsule", "make": "train.py:make"}) == "told\nsummary"
    given_to("memory", {"make": "train:make"})
    given_to("advise", {"make": "train:make", "gpu": "h200"})
    assert given_to("run", {"script": "train.py", "args": ["--lr", "1"], "output": "r"}).startswith(
        "exit code 0\nampwise: summary\n"
    )
    assert asked.asked == [
        ["replay", "--output-format=full", "./capsule", "./train.py:make"],
        ["memory", "--json", "-q", "train:make"],
        ["advise", "--json", "--gpu=h200", "train:make"],
        ["run", "--output=./r", "./train.py", "--lr", "1"],
    ]
    for tool, arguments in (
        ("run", {"script": "../secret.py"}),
        ("run", {"script": "train.py", "output": "../r"}),
        ("memory", {"make": "../secret.py:make"}),
        ("replay", {"capsule": "capsule", "make": "../secret.py:make"}),
    ):
        assert "outside of" in refused(project, tool, arguments, allow_run=True, run_command=asked)
    assert "above 0" in refused(project, "run", {"script": "train.py", "seconds": 0}, allow_run=True, run_command=asked)
    assert len(asked.asked) == 4


# --- the limits


def test_the_page_has_the_limits_that_hold():
    page = " ".join((ROOT / "docs" / "agents.md").read_text().split())
    for said in (
        f"at most {LONGEST:,} characters",
        f"up to {MOST_FINDINGS} findings",
        f"stopped after {mcp_server.SECONDS:g} seconds",
        f"scripts above {mcp_worker.LARGEST_BYTES // 1_000_000} MB",
        f"more than {mcp_worker.MOST_FILES:,} scripts or {mcp_worker.MOST_NAMES} paths",
        f"tested with mcp {FIRST[0]}.{FIRST[1]}",
        f"{mcp_server.MOST_AT_ONCE} requests run at once, up to {mcp_server.MOST_WAITING} are queued",
    ):
        assert said in page
    for tool in (*TOOLS, *NEEDS_ALLOW_RUN):
        assert f"| `{tool}` | `ampwise {COMMAND_OF_TOOL.get(tool, tool)}" in page


# --- the folder


@pytest.fixture
def trapped(project):
    """The project with every way out that a folder can have."""
    (project / "link.py").symlink_to(project.parent / "secret.py")
    (project / "up").symlink_to(project.parent)
    (project / "null.py").symlink_to("/dev/null")
    (project / "loop.py").symlink_to("loop.py")
    os.mkfifo(project / "pipe.py")
    return project


@pytest.mark.parametrize(
    "name",
    ["..", "../secret.py", "a/../../secret.py", "link.py", "up", "up/secret.py", "null.py", "/etc/passwd", "/dev/zero"],
)
def test_what_leads_out_is_refused(trapped, name):
    for tool, arguments in (("check", {"paths": [name]}), ("fix", {"paths": [name], "write": True})):
        assert "outside of" in refused(trapped, tool, arguments)
    assert "outside of" in refused(trapped, "read_report", {"run": name})
    assert (trapped.parent / "secret.py").read_text() == BAD


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "expected the name of a file or folder"),
        ("\0", "expected the name of a file or folder"),
        ("x" * 5000, "expected the name of a file or folder"),
        ("gone.py", "no such file or directory"),
        ("pipe.py", "expected a file, got something else"),
        ("loop.py", ""),
    ],
)
def test_what_is_no_file_is_refused(trapped, name, said):
    assert said in refused(trapped, "check", {"paths": [name]})


def test_a_walk_follows_no_link(trapped):
    found = json.loads(call(trapped, "check")[1])["findings"]
    assert [each["file"] for each in found] == ["train.py"]


@pytest.mark.parametrize("name", ["findings.jsonl", "dist"])
def test_a_record_with_a_link_out_is_refused(project, name):
    (project / "run").mkdir()
    (project / "run" / name).symlink_to(project.parent)
    assert "outside of" in refused(project, "read_report", {"run": "run"})


def test_a_record_is_of_files_alone(project):
    """A pipe would be waited for, and what a linked folder holds was not looked at."""
    for folder in ("piped", "linked", "elsewhere", "fine"):
        (project / folder).mkdir()
    os.mkfifo(project / "piped" / "manifest.json")
    (project / "linked" / "rank-1").symlink_to("../elsewhere")
    (project / "elsewhere" / "manifest.json").symlink_to(project.parent / "secret.py")
    (project / "fine" / "manifest.json").symlink_to("../train.py")
    for name in ("piped", "linked"):
        assert "expected a file or a folder" in refused(project, "read_report", {"run": name})
    assert AgentFolder(project).folder("fine") == "./fine"


@pytest.mark.parametrize("name", ["ampwise.toml", "pyproject.toml"])
def test_settings_are_no_way_out(project, name):
    (project.parent / "secret.toml").write_text('ampwise_token = "hunter2"\n')
    (project / name).symlink_to("../secret.toml")
    (project / "below").mkdir()
    (project / "below" / "train.py").write_text(BAD)
    asked = [{}, {"paths": ["train.py"]}, {"paths": ["below"]}, {"paths": ["below/train.py"]}, {"text": BAD}]
    for arguments in asked:
        assert "outside of" in refused(project, "check", arguments)


def test_what_is_huge_is_refused_however_many_names_it_has(project, monkeypatch):
    for folder in ("a", "b"):
        (project / folder).mkdir()
        (project / folder / "train.py").write_text(BAD)
    monkeypatch.setattr(mcp_worker, "MOST_FILES", 1)
    assert AgentFolder(project).scripts(["a", "a", "a/train.py"]) == ["./a/train.py"]
    assert "more than 1 files" in refused(project, "check", {"paths": ["a", "b"]})
    monkeypatch.setattr(mcp_worker, "MOST_NAMES", 1)
    assert "expected at most 1, got 2" in refused(project, "check", {"paths": ["a", "b"]})


def test_what_is_huge_is_refused(project, monkeypatch):
    monkeypatch.setattr(mcp_worker, "LARGEST_BYTES", 10)
    assert "too large for a script" in refused(project, "check", {"paths": ["train.py"]})
    monkeypatch.setattr(mcp_worker, "MOST_FILES", 0)
    assert "more than 0 files" in refused(project, "check", {})
    monkeypatch.setattr(mcp_worker, "MOST_ENTRIES", 0)
    assert "more than 0 entries" in refused(project, "check", {})
    monkeypatch.setattr(mcp_server, "LONGEST_TEXT", 3)
    assert "expected at most 3 characters" in refused(project, "check", {"text": BAD})


def test_an_absolute_path_in_it_will_do(project):
    assert AgentFolder(project).file(str(project / "train.py")) == "./train.py"


def test_a_symlink_that_was_put_there_since_is_not_read(trapped):
    """Here it is there from the first, but nobody looked: words that are no names go through as they are."""
    (trapped / "ampwise.toml").write_text("")

    def checked(*words):
        return anyio.run(lambda: launch(["check", "--json", "--exit-zero", *words], cwd=trapped, seconds=60))

    for link in ("./link.py", "./up/secret.py"):
        through_a_link = checked(link)
        assert [item["code"] for item in json.loads(through_a_link.out)] == [None], "not checked, and no finding"
        assert through_a_link.err.count("leads out of") == 1
    assert [each["code"] for each in json.loads(checked("./train.py").out)] == ["AMP101"]


@given(st.text(st.sampled_from("./a~-link\0\n\\ü"), max_size=30))
def test_no_name_leads_out(tmp_path_factory, name):
    root = tmp_path_factory.getbasetemp() / "law"
    root.mkdir(exist_ok=True)
    with contextlib.suppress(BadInput):
        told = AgentFolder(root).new(name)
        assert told.startswith("./")
        assert (root / told).resolve().is_relative_to(root.resolve())


def test_the_whole_machine_is_no_folder():
    with pytest.raises(BadInput, match="the whole machine"):
        AgentFolder("/")


# --- the process


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_what_fits_is_kept_whole(parts):
    kept, whole = BoundedOutput(limit=400), b"".join(parts)
    for part in parts:
        kept.add(part)
    assert kept.text() == whole.decode("utf-8", "replace")


def test_a_mistake_of_ours_says_nothing_but_that(project, caplog):
    async def fails(words, **_):
        raise KeyError("private")

    assert call(project, "formats", run_command=fails) == (True, "Error executing tool formats")
    assert "private" in caplog.text


def test_what_takes_too_long_is_stopped(tmp_path):
    with pytest.raises(BadInput, match=r"ampwise formats took longer than 0\.01 seconds and was stopped"):
        anyio.run(lambda: launch(["formats"], cwd=tmp_path, seconds=0.01))


def test_what_it_started_ends_with_it(tmp_path, monkeypatch):
    """A child that holds the streams open is neither waited for nor left behind."""
    os.mkfifo(tmp_path / "held")
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(mcp_process, "PYTHON", ("sh", "-c", "exec 3>held; sleep 600 & echo started"))
    ended = anyio.run(lambda: launch(["run"], cwd=tmp_path, seconds=60))
    assert ended == CommandResult(code=0, out="started\n", err="")
    assert select.select([reader], [], [], 120)[0], "the child holds the pipe"
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_when_the_server_is_ended_so_is_what_it_runs(project, monkeypatch):
    """An agent's host may send SIGTERM and not wait."""
    left = []
    monkeypatch.setattr(mcp_process, "PYTHON", ("sh", "-c", "sleep 600"))
    monkeypatch.setattr(os, "_exit", left.append)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    async def until_told():
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            while not mcp_process._RUNNING:
                await anyio.sleep(0.01)
            signal.raise_signal(signal.SIGTERM)

    async def ask():
        ended.append(await launch(["run"], cwd=project, seconds=60))

    ended = []
    server = mock.Mock(run=lambda _: anyio.run(until_told))
    monkeypatch.setattr(mcp_server, "make_server", lambda *_, **__: server)
    try:
        mcp_server.serve(project, allow_run=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert left == [128 + signal.SIGTERM]
    assert [each.code for each in ended] == [-signal.SIGKILL]
    assert not mcp_process._RUNNING


@pytest.mark.parametrize("word", ["a\0b", "x" * 3_000_000], ids=["null", "long"])
def test_what_no_command_line_takes_is_a_line(project, word):
    told = refused(project, "advise", {"gpu": word}, run_command=launch)
    assert told == "ampwise advise: an argument is longer than 10,000 characters or contains NUL."


WITHOUT_END = "case $(cat) in *formats*) echo '[]';; *) echo $$ > pid; exec sleep 600;; esac"


async def started(folder):
    """The number of the process that works without end, when there is one."""
    while not (text := (folder / "pid").read_text() if (folder / "pid").exists() else ""):
        await anyio.sleep(0.01)
    return int(text)


def is_there(number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, 0)
        return True
    return False


def test_others_are_answered_while_one_hangs_and_when_called_off_it_is_gone(project, monkeypatch):
    monkeypatch.setattr(mcp_process, "PYTHON", ("sh", "-c", WITHOUT_END))

    async def ask():
        server = make_server(AgentFolder(project), run_command=launch)
        async with Client(server) as client, anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "check", {})
            hanging = await started(project)
            answer = await client.call_tool("formats", {})
            group.cancel_scope.cancel()
        return hanging, answer.content[0].text

    hanging, text = anyio.run(ask)
    assert text == "[]\n"
    assert not is_there(hanging)
    assert not mcp_process._RUNNING


def test_what_took_too_long_is_an_error_of_a_line_and_gone(project, monkeypatch):
    monkeypatch.setattr(mcp_process, "PYTHON", ("sh", "-c", WITHOUT_END))
    monkeypatch.setattr(mcp_server, "SECONDS", 0.5)
    told = refused(project, "check", {}, run_command=launch)
    assert told == "ampwise check took longer than 0.5 seconds and was stopped."
    assert not any(is_there(int(path.read_text())) for path in project.glob("pid"))


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("check", {}),
        ("check", {"text": BAD}),
        ("fix", {"paths": ["gone", "../secret.py"]}),
        ("read_report", {"run": "gone"}),
        ("replay", {"capsule": "gone", "make": "gone.py:make"}),
        ("memory", {"make": "gone.py:make"}),
        ("run", {"script": "gone.py", "output": "../out"}),
    ],
)
def test_the_server_itself_looks_at_nothing(project, monkeypatch, tool, arguments):
    """Whatever may take long is left to the process of the request."""
    asked = []

    async def launched(words, **_):
        asked.append(words)
        return CommandResult(code=0, out="", err="")

    monkeypatch.setattr(AgentFolder, "_inside", None)
    monkeypatch.setattr(AgentFolder, "settings", None)
    is_error, _ = call(project, tool, arguments, allow_run=True, run_command=launched)
    assert not is_error
    assert asked


def test_only_so_many_are_worked_on_at_once_and_wait(project, monkeypatch):
    monkeypatch.setattr(mcp_server, "MOST_WAITING", 7)
    working, most, go_on = 0, 0, anyio.Event()

    async def launched(words, **_):
        nonlocal working, most
        working, most = working + 1, max(most, working + 1)
        await go_on.wait()
        working -= 1
        return CommandResult(code=0, out="[]", err="")

    async def ask():
        answers = []
        async with Client(make_server(AgentFolder(project), run_command=launched)) as client:

            async def one():
                answers.append((await client.call_tool("formats", {})).content[0].text)

            async with anyio.create_task_group() as group:
                for _ in range(9):
                    group.start_soon(one)
                while len(answers) < 2:
                    await anyio.sleep(0.01)
                go_on.set()
        return answers

    answers = anyio.run(ask)
    assert most == mcp_server.MOST_AT_ONCE
    assert sorted(answers) == ["7 requests are still running: try again later."] * 2 + ["[]\n"] * 7


def test_no_program_or_library_is_looked_for_in_the_folder(project, monkeypatch):
    """PATH= with an empty part means the current folder, which is the agent's."""
    (project / "bin").mkdir()
    for tool in (project / "nvidia-smi", project / "bin" / "nvidia-smi"):
        tool.write_text("#!/bin/sh\ntouch was-run\n")
        tool.chmod(0o755)
    (project.parent / "way").symlink_to(project / "bin")
    ways = [":", "", ".", "bin", str(project), str(project / "bin"), str(project.parent / "way")]
    monkeypatch.setenv("PATH", os.pathsep.join([*ways, os.environ["PATH"]]))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{project}:/usr/lib:")
    monkeypatch.setenv("DYLD_LIBRARY_PATH", ":")
    told = 'cat > /dev/null; nvidia-smi || echo none; echo "$LD_LIBRARY_PATH ${DYLD_LIBRARY_PATH-unset}"'
    monkeypatch.setattr(mcp_process, "PYTHON", ("/bin/sh", "-c", told))
    ended = anyio.run(lambda: launch(["gpu"], cwd=project, seconds=60))
    assert not (project / "was-run").exists()
    assert ended.out.splitlines() == ["none", "/usr/lib unset"] or "Driver" in ended.out
    monkeypatch.setenv("PATH", ":")
    assert "PATH" not in mcp_process._environment(project, own_code=False)
    assert mcp_process._environment(project, own_code=True)["PATH"] == ":"


def test_of_the_folder_nothing_is_on_the_path_unless_it_may_be_run(tmp_path, monkeypatch):
    folder, other = tmp_path / "project", tmp_path / "other"
    given = ["", str(folder), str(folder / "src"), str(other), str(mcp_process.HOME)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))

    def kept(cwd, **options):
        return mcp_process._environment(cwd, **options)["PYTHONPATH"].split(os.pathsep)

    assert kept(folder, own_code=False) == given[3:]
    assert kept(folder, own_code=True) == given[2:]
    assert str(mcp_process.HOME) in kept(mcp_process.HOME.parent, own_code=False)


# --- the package


@pytest.mark.parametrize("version", ["1.28.1", "2.2.9", "3.0.0"])
def test_an_untested_version_is_reported(monkeypatch, version):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(BadInput, match=rf"needs mcp 2\.3 or later, below 3\.0, but {version} is installed: pip"):
        need_mcp()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(MissingDependency, match=r'needs the package mcp: pip install "ampwise\[mcp\]"'):
        need_mcp()


def test_the_extra_names_the_tested_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["mcp"] == [f"mcp>={FIRST[0]}.{FIRST[1]},<{TOO_LATE[0]}"]


# --- the whole, as an agent starts it


def test_over_stdio_with_nothing_of_the_folder_imported(project):
    for name in ("json", "rich", "anyio", "jinja2"):
        (project / f"{name}.py").write_text(f"open('imported-{name}', 'w')\n")

    async def ask():
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "ampwise", "mcp"],
            cwd=project,
            env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{project}{os.pathsep}", "PATH": os.environ["PATH"]},
        )
        async with Client(stdio_client(server)) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            checked = await client.call_tool("check", {})
            outside = await client.call_tool("check", {"paths": ["../secret.py"]})
            return names, checked, outside

    names, checked, outside = anyio.run(ask)
    assert tuple(names) == TOOLS
    assert [each["code"] for each in json.loads(checked.content[0].text)["findings"]] == ["AMP101"]
    assert outside.is_error
    assert not list(project.glob("imported-*"))
