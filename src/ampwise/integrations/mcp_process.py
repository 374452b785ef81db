"""Run a command in its own process, which can be stopped and whose output is bounded and kept out of the protocol."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ampwise.errors import BadInput
from ampwise.hardware.programs import absolute_parts
from ampwise.integrations.mcp_worker import Word

if TYPE_CHECKING:
    from anyio.abc import ByteReceiveStream, Process

MAX_OUTPUT = 4_000_000  # bytes of output that are kept, per stream
# -P: without it Python would look for modules in the folder and could run a json.py there.
PYTHON = (sys.executable, "-P", "-m", "ampwise.integrations.mcp_worker")
HOME = Path(__file__).resolve().parents[2]  # where ampwise is imported from
DRAIN_S = 2.0  # seconds to read remaining output after a process has ended
_RUNNING: dict[int, Process] = {}  # by pid, to end them with the server
PLAIN = {"NO_COLOR": "1", "COLUMNS": "110"}
LONGEST_WORD = 10_000  # of a command line
# Search paths for programs and libraries: an empty part, which is easily there by accident, is the current folder.
SEARCHED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class CommandLauncher(Protocol):
    """Function that runs a command."""

    async def __call__(
        self, words: Sequence[Word], *, cwd: Path, seconds: float, text: str | None = None
    ) -> CommandResult: ...


class BoundedOutput:
    """Beginning and end of a process's output, at most ``limit`` bytes.

    >>> kept = BoundedOutput(limit=8)
    >>> kept.add(b"0123"), kept.add(b"456789")
    (None, None)
    >>> kept.text()
    '0123\\n[... 2 bytes left out ...]\\n6789'
    """

    def __init__(self, limit: int = MAX_OUTPUT) -> None:
        self._half = limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        free = self._half - len(self._head)
        self._head += data[:free]
        self._tail += data[free:]
        over = max(0, len(self._tail) - self._half)
        del self._tail[:over]
        self._dropped += over

    def text(self) -> str:
        gap = b"\n[... %d bytes left out ...]\n" % self._dropped if self._dropped else b""
        return bytes(self._head + gap + self._tail).decode("utf-8", "replace")


async def launch(
    words: Sequence[Word], *, cwd: Path, seconds: float, text: str | None = None, own_code: bool = False
) -> CommandResult:
    """Run ``ampwise`` with these words; BadInput if it takes too long or a word cannot be in a command line.

    Paths are checked in that process, too, so that the server never waits for a disk. With ``own_code`` the process may
    import modules in the folder that are on PYTHONPATH.
    """
    import anyio

    for word in words:
        if isinstance(word, str) and (len(word) > LONGEST_WORD or "\0" in word):
            raise BadInput(
                f"ampwise {words[0]}: an argument is longer than {LONGEST_WORD:,} characters or contains NUL."
            )
    plain = [word if isinstance(word, str) else asdict(word) for word in words]
    request = json.dumps({"words": plain, "text": text, "own_code": own_code}).encode()
    try:
        process = await anyio.open_process(
            list(PYTHON),
            cwd=cwd,
            env=_environment(cwd, own_code=own_code),
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that what it starts ends with it
        )
    except OSError as error:  # the folder was removed, or there are too many processes
        raise BadInput(f"cannot start a process in {cwd}: {error.strerror or error}.") from None
    _RUNNING[process.pid] = process
    try:
        with anyio.fail_after(seconds):
            return await _communicate(process, request)
    except TimeoutError:
        raise BadInput(f"ampwise {words[0]} took longer than {seconds:g} seconds and was stopped.") from None
    finally:
        _kill(process)  # also if the agent cancelled the request
        _RUNNING.pop(process.pid, None)
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def _communicate(process: Process, request: bytes) -> CommandResult:
    """Send the request, and read the output until the process has ended."""
    import anyio

    out, err = BoundedOutput(), BoundedOutput()

    async def drain(stream: ByteReceiveStream, kept: BoundedOutput) -> None:
        async for data in stream:
            kept.add(data)

    async with anyio.create_task_group() as group:
        for stream, kept in ((process.stdout, out), (process.stderr, err)):
            if stream is not None:
                group.start_soon(drain, stream, kept)
        if process.stdin is not None:
            with contextlib.suppress(anyio.BrokenResourceError):  # the process ended before it read everything
                await process.stdin.send(request)
            await process.stdin.aclose()
        code = await process.wait()
        # Children may hold its streams open: end them, and stop reading after a while.
        _kill(process)
        group.cancel_scope.deadline = anyio.current_time() + DRAIN_S
    return CommandResult(code=code, out=out.text(), err=err.text())


def _environment(cwd: Path, *, own_code: bool) -> dict[str, str]:
    """Return our environment with search paths that do not lead into the folder.

    An empty part of PATH would mean the folder itself. With ``own_code``, subfolders stay on the paths; the folder that
    ampwise is imported from always does.
    """
    found = os.environ | PLAIN
    if not own_code:
        found |= {name: absolute_parts(found[name], outside=str(cwd)) for name in SEARCHED if name in found}
    paths = [Path(each).resolve() for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    kept = [each for each in paths if each != cwd and (own_code or each == HOME or not each.is_relative_to(cwd))]
    found["PYTHONPATH"] = os.pathsep.join(map(str, kept))
    # An empty variable would mean the current folder again.
    return {name: value for name, value in found.items() if value or name not in (*SEARCHED, "PYTHONPATH")}


def end_all() -> None:
    """Kill all running processes."""
    for process in list(_RUNNING.values()):
        _kill(process)


def _kill(process: Process) -> None:
    """Kill a process and its children, which may outlive it."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
