"""Runs the code of answers: each in a fork of a process that has torch loaded, in a folder of its own, with limits.

The limits are against mistakes, not against malice: no network, no processes, no files written outside of the folder,
so much time and memory. Code of an agent that you do not trust belongs in a container or a virtual machine.

``python -m evals.sandbox`` is the process that forks; it reads a request on each line and answers on a line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

ROOT = Path(__file__).parents[1]
SECONDS = 20.0  # of a processor
WALL_PER_CPU = 20
GIB = 2**30
LONGEST = 300  # characters of a reason
REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill", "os.putenv",
    "ftplib.", "urllib.", "http.client.", "smtplib.", "pty.spawn",
)  # fmt: skip
CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
    "shutil.",
)  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Sandbox:
    """The process that forks; started with the first run, ended with the ``with`` block."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def run(self, code: str, test: str) -> str | None:
        """Run a module and then its test; return None if it is right, else what is wrong."""
        if self._process is None:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evals.sandbox"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = json.dumps({"code": code, "test": test, "seconds": self.seconds})
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        wrong: str | None = json.loads(self._process.stdout.readline())
        return wrong

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait(timeout=60)
            self._process.stdout.close()  # type: ignore[union-attr]


def serve() -> None:
    """Answer requests until stdin ends."""
    import torch

    from evals import lab

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for engine in (False, True):  # a step of each kind imports what torch and ampwise import late: once, here
        lab.rehearse(engine)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryDirectory(prefix="evals-") as folder:
            wrong = _in_fork(request, folder)
        print(json.dumps(wrong), flush=True)


def _in_fork(request: dict[str, Any], folder: str) -> str | None:
    """Return what is wrong; None if nothing is."""
    reading, writing = os.pipe()
    word = secrets.token_hex(8)  # an answer that prints a result of its own does not know it
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(request, folder, writing, word)
    os.close(writing)
    said, end = b"", time.monotonic() + WALL_PER_CPU * request["seconds"]  # other work may share the processor
    while (left := end - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
        part = os.read(reading, 65536)
        if not part:
            break
        said += part
    os.close(reading)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if not said and (left <= 0 or ended_by == signal.SIGXCPU):
        return f"it ran longer than {request['seconds']:g} s"
    found, _, reason = said.decode(errors="replace").partition("\n")
    if found != word:
        return "the process ended before the test did: by exit(), by a crash, or at a limit"
    return reason or None


def _child(request: dict[str, Any], folder: str, writing: int, word: str) -> NoReturn:
    reason = "it could not be started"
    try:
        os.setsid()
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        for limit, most in (
            (resource.RLIMIT_CPU, math.ceil(request["seconds"])),
            (resource.RLIMIT_FSIZE, 50_000_000),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_AS, 16 * GIB),
        ):
            resource.setrlimit(limit, (most, most + 1))  # the soft limit of the CPU sends SIGXCPU, the hard one kills
        sys.addaudithook(_guard(folder))
        reason = _verdict(request["code"], request["test"])
        os.write(writing, f"{word}\n{reason[:LONGEST]}".encode())
    finally:
        os._exit(0)


def _verdict(code: str, test: str) -> str:
    from evals import lab

    lab.spy_on_torch()
    names: dict[str, Any] = {"__name__": "answer", "__file__": "answer.py"}
    helpers = {name: getattr(lab, name) for name in ("trains", "expect", "close", "make_model", "make_batches")}
    try:
        exec(compile(code, "answer.py", "exec"), names)
    except BaseException as error:
        return f"the code does not run: {_told(error)}"
    try:
        exec(compile(test, "test.py", "exec"), names | helpers)
    except lab.WrongAnswer as error:
        return str(error)
    except BaseException as error:
        return f"it fails: {_told(error)}"
    return ""


def _told(error: BaseException) -> str:
    lines = [f" (line {at.lineno})" for at in traceback.extract_tb(error.__traceback__) if at.filename == "answer.py"]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{lines[-1] if lines else ''}"


def _guard(folder: str) -> Any:
    """Return an audit hook that refuses what an answer has no business doing; it cannot be removed."""
    inside = os.path.realpath(folder)

    def is_inside(path: object) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return True  # a file that is open already
        real = os.path.realpath(os.fsdecode(path))
        return real == os.devnull or os.path.commonpath([real, inside]) == inside

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is refused in the sandbox")
        writes = event == "open" and (
            any(letter in (args[1] or "") for letter in "wax+") if isinstance(args[1], str) else bool(args[2] & WRITES)
        )
        if (writes or event.startswith(CHANGES)) and not is_inside(args[0]):
            raise PermissionError(f"{event} outside of the folder is refused in the sandbox")

    return hook


if __name__ == "__main__":
    serve()
