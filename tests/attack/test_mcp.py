"""A hostile agent at `ampwise mcp`, the real server over its stdin and stdout: it reads nothing else, and goes on."""

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ampwise.integrations import mcp_server

from .effort import rounds

pytest.importorskip("mcp")

SECRET = "hunter2"
BAD = "import torch\nfrom torch.nn.utils import clip_grad_norm_\n" + (
    "scaler = torch.amp.GradScaler('cuda')\n"
    "for x in loader:\n"
    "    loss = model(x).sum()\n"
    "    scaler.scale(loss).backward()\n"
    "    clip_grad_norm_(model.parameters(), 1.0)\n"
    "    scaler.step(optimizer)\n"
    "    scaler.update()\n"
)
PATIENCE_S = 120.0  # for a machine under load; no verdict depends on it
VERSION = "2025-06-18"


class Agent:
    """Speaks JSON-RPC with a server of its own, and keeps all that it hears."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ampwise", "mcp"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"NO_COLOR": "1"},
        )
        self.number, self.heard, self.known, self.errors = 0, queue.Queue(), {}, []
        self.threads = [
            threading.Thread(target=self._listen),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr)),
        ]
        for thread in self.threads:
            thread.start()
        about = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "agent", "version": "1"}}
        self.answer(self.ask("initialize", about))
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def _listen(self):
        for line in self.process.stdout:
            self.heard.put(json.loads(line))

    def send(self, message):
        self.raw(json.dumps(message).encode() + b"\n")

    def raw(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def ask(self, method, params):
        self.number += 1
        self.send({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params})
        return self.number

    def call(self, tool, /, **arguments):
        return self.ask("tools/call", {"name": tool, "arguments": arguments})

    def answer(self, number):
        end = time.monotonic() + PATIENCE_S
        while number not in self.known:
            message = self.heard.get(timeout=max(0.1, end - time.monotonic()))
            self.known[message.get("id")] = message
        return self.known.pop(number)

    def said(self, number):
        """Whether an answer is an error, and its text."""
        answer = self.answer(number)
        if "error" in answer:
            return True, json.dumps(answer["error"])
        return answer["result"].get("isError", False), answer["result"]["content"][0]["text"]

    def is_well(self):
        return self.answer(self.ask("ping", {}))["result"] == {}

    def workers(self):
        """The processes that it has started and that are there."""
        with contextlib.suppress(FileNotFoundError):
            return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return []

    def close(self):
        self.process.stdin.close()
        self.process.wait(120)
        for thread in self.threads:
            thread.join()
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with every trap that a folder can have; beside it what nobody in it may see."""
    above = tmp_path_factory.mktemp("above")
    folder = above / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "train.py").write_text(BAD)
    (folder / "sub" / "other.py").write_text(BAD)
    (above / "secret.py").write_text(BAD.replace("model(x)", f"model({SECRET!r})"))
    (above / "secret.toml").write_text(f"{SECRET} = 1\n")
    (above / "projector").mkdir()  # whose name begins as the folder's does
    (above / "projector" / "secret.py").write_text(f"{SECRET} = (\n")
    (folder / "link.py").symlink_to(above / "secret.py")
    (folder / "up").symlink_to(above)
    (folder / "loop").symlink_to("loop")
    (folder / "null.py").symlink_to("/dev/null")
    os.mkfifo(folder / "pipe.py")
    os.mkfifo(folder / "sub" / "pyproject.toml")
    with (folder / "sub" / "huge.py").open("wb") as huge:
        huge.truncate(2**40)
    return folder


@pytest.fixture(scope="module")
def agent(project):
    agent = Agent(project)
    yield agent
    agent.close()
    assert not [line for line in agent.errors if SECRET.encode() in line]


NAMES = [
    "..", "../secret.py", "sub/../../secret.py", "../projector/secret.py", "./up/secret.py", "link.py", "up", "loop",
    "loop/x.py", "null.py", "pipe.py", "sub", "sub/huge.py", "TRAIN.PY", "/etc/passwd", "/proc/self/environ",
    "/dev/stdin", "/dev/zero", "//etc/passwd", "file:///etc/passwd", "~/.bashrc", "$HOME", "-",
    "--config=../secret.toml",
    "--help", "-h", "train.py\n../secret.py", "train.py\0", "%2e%2e/secret.py", "..\\secret.py", "x" * 300, "x/" * 400,
    "y" * 5000, "\u202etrain.py", "\x1b[2J", "é", "", " ", ".", "*", "[a-z]*", "train.py/", "train.py/..", "@train.py",
]  # fmt: skip
TOOLS = {
    "check": lambda name: {"paths": [name]},
    "fix": lambda name: {"paths": [name], "write": True},
    "read_report": lambda name: {"run": name},
    "explain": lambda name: {"rule": name},
    "gpu": lambda name: {"name": name or "h200"},
    "formats": lambda name: {"names": [name]},
    "replay": lambda name: {"capsule": name, "build": f"{name}:make"},
    "memory": lambda name: {"params": name or "7B", "gpu": name},
}


CHEAP = [tool for tool in TOOLS if tool not in ("gpu", "memory")]  # which may import torch, for seconds


@pytest.mark.nightly
def test_no_name_gets_more_than_the_folder(agent, project):
    chance = random.Random(7)
    tries = [(tool, name) for tool in CHEAP + rounds([], ["gpu", "memory"]) for name in NAMES]
    asked = {agent.call(tool, **TOOLS[tool](name)): (tool, name) for tool, name in chance.sample(tries, rounds(8, 60))}
    for number, (tool, name) in asked.items():
        is_error, text = agent.said(number)
        assert SECRET not in text, (tool, name)
        assert not is_error or "\n" not in text, (tool, name)
        assert "Traceback" not in text, (tool, name)
    assert SECRET in (project.parent / "secret.py").read_text()
    assert agent.is_well()


def anything(chance, depth=0):
    """Any value of JSON."""
    kinds = [None, True, -1, 10**400, 1e308, "", "x" * chance.randint(0, 20_000), "NaN", {}, []]
    if depth < 3 and chance.random() < 0.4:
        inner = [anything(chance, depth + 1) for _ in range(chance.randint(0, 4))]
        return inner if chance.random() < 0.5 else {str(key): value for key, value in enumerate(inner)}
    return chance.choice(kinds)


def test_arguments_of_any_kind_are_answered(agent):
    chance = random.Random(8)
    parameters = ["paths", "text", "select", "rule", "names", "gpu", "params", "want", "run", "unknown", "self", "cwd"]
    for _ in range(rounds(8, 40)):
        given = {each: anything(chance) for each in chance.sample(parameters, chance.randint(0, 4))}
        text = agent.said(agent.call(chance.choice([*CHEAP, "run", "", "__init__"]), **given))[1]
        assert "Traceback" not in text
        assert SECRET not in text
        assert len(text) < 2 * mcp_server.LONGEST
    assert agent.is_well()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"\x00\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"jsonrpc": "2.0", "id": 1e999, "method": "tools/list"}',
        b'{"jsonrpc": "2.0", "id": {}, "method": "tools/list"}',
        b'{"jsonrpc": "2.0", "id": "\\ud800", "method": "tools/call", "params": {"name": "\\ud800"}}',
        b'{"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "check", "arguments": {}}}',
        b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 10000}}',
        b'{"jsonrpc": "2.0", "id": 77777, "result": {}}',
        b'[{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}]',
        b'{"jsonrpc": "2.0", "id": 5, "method": "' + b"x" * 2_000_000 + b'"}',
    ],
    ids=lambda line: line[:20].decode("ascii", "replace"),
)
def test_lines_that_are_no_requests_do_not_end_it(agent, line):
    agent.raw(line + b"\n")
    assert agent.is_well()


def test_many_at_once_are_answered_some_are_called_off_and_nothing_stays(agent):
    asked = [agent.call("check", paths=["train.py"]) for _ in range(rounds(6, 30))]
    off = asked[::3]
    for number in off:
        agent.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}})
    for number in asked:
        if number not in off:
            assert "AMP101" in agent.said(number)[1]
            assert len(agent.workers()) <= mcp_server.MOST_AT_ONCE
    assert agent.is_well()
    end = time.monotonic() + PATIENCE_S
    while agent.workers() and time.monotonic() < end:
        time.sleep(0.05)
    assert agent.workers() == []


def test_a_symlink_swapped_in_while_it_is_read_says_nothing(agent, project):
    """Somebody who may write to the folder, and not read what is beside it, as an agent in a sandbox."""
    place, spare, done = project / "sub" / "swapped.py", project / "sub" / "spare", threading.Event()

    def swap():
        while not done.is_set():
            spare.write_text(BAD)
            spare.replace(place)
            with contextlib.suppress(FileExistsError):
                spare.symlink_to(project.parent / "secret.py")
            spare.replace(place)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(rounds(2, 15)):
            text = agent.said(agent.call("fix", paths=["sub/swapped.py"], unsafe=True))[1]
            assert SECRET not in text
    finally:
        done.set()
        swapping.join()
        place.unlink(missing_ok=True)
    assert agent.is_well()


@pytest.mark.parametrize(
    ("name", "text", "may_be_read"),
    [
        ("pyproject.toml", "[tool.ampwise]\nselect = " + "[" * 20_000 + "]" * 20_000, False),
        ("pyproject.toml", "".join(f"[tool.ampwise.{'a.' * 2000}b{n}]\n" for n in range(20)), False),
        ("ampwise.toml", "x = '''" + "y" * 5_000_000, False),
        ("deep.py", "x = " + "(" * 50_000, True),
        ("deep.ipynb", '{"cells": ' + "[" * 100_000, True),
    ],
    ids=["nested", "keys", "long", "script", "notebook"],
)
def test_what_is_nested_or_long_is_a_line(agent, project, name, text, may_be_read):
    (project / name).write_text(text)
    try:
        is_error, said = agent.said(agent.call("check"))
        assert is_error or may_be_read
        assert is_error is False or "\n" not in said
        assert "Traceback" not in said
    finally:
        (project / name).unlink()
    assert agent.is_well()


def test_huge_files_and_pipes_are_passed_over(agent):
    answer = json.loads(agent.said(agent.call("check"))[1])
    assert {each["file"] for each in answer["findings"]} == {"train.py", "sub/other.py"}
    assert any("huge.py: cannot check: larger than" in note for note in answer["notes"])


@pytest.mark.nightly
def test_a_huge_folder_is_refused_before_it_is_taken_in(agent, project):
    many = project / "many"
    many.mkdir()
    for number in range(20_001):
        os.link(project / "train.py", many / f"{number}.txt")
    for path in (["."], ["many"]):
        assert "more than 20000 entries" in agent.said(agent.call("check", paths=path))[1]
    assert "more than 20000 entries" in agent.said(agent.call("read_report", run="many"))[1]
    try:
        descriptor = os.open(project, os.O_RDONLY)
        for name in ["deep"] + ["d"] * 1500:
            os.mkdir(name, dir_fd=descriptor)
            below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        os.close(descriptor)
        assert "no Python file" in agent.said(agent.call("check", paths=["deep"]))[1]
    finally:
        subprocess.run(["rm", "-rf", project / "deep"], check=True)  # deeper than Python's own can remove
    assert agent.is_well()
