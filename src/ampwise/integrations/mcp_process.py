"""A verb in a process of its own: it can be stopped, and what it says is bounded and never part of the protocol."""

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
from ampwise.integrations.mcp_folder import Word
from ampwise.programs import absolute_parts

if TYPE_CHECKING:
    from anyio.abc import ByteReceiveStream, Process

__all__ = ["Ended", "Kept", "Launch", "end_all", "launch"]

ROOM = 4_000_000  # bytes of what a process says that are kept, of each stream
# -P: without it Python would look for modules in the folder, and a json.py there would be run.
PYTHON = (sys.executable, "-P", "-m", "ampwise.integrations.mcp_worker")
HOME = Path(__file__).resolve().parents[2]  # where ampwise is imported from
LAST_WORDS = 2.0  # seconds for what a process has said to arrive when it has ended
_RUNNING: dict[int, Process] = {}  # by number, for when the server itself is told to end
PLAIN = {"NO_COLOR": "1", "COLUMNS": "110"}
LONGEST_WORD = 10_000  # of a command line
# Where programs and libraries are looked for: an empty part, which is easily there by accident, is the current folder.
SEARCHED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What came of it."""

    code: int
    out: str
    err: str


class Launch(Protocol):
    """How a verb is run."""

    async def __call__(self, words: Sequence[Word], *, cwd: Path, seconds: float, text: str | None = None) -> Ended: ...


class Kept:
    """The beginning and the end of what a process says.

    >>> kept = Kept(room=8)
    >>> kept.add(b"0123"), kept.add(b"456789")
    (None, None)
    >>> kept.text()
    '0123\\n[... 2 bytes left out ...]\\n6789'
    """

    def __init__(self, room: int = ROOM) -> None:
        self._half = room // 2
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
) -> Ended:
    """Run ``ampwise`` with these words; BadInput when it takes too long, or they are none of a command line.

    What they name in the folder is looked at in that process, too: nothing here waits for a disk.

    With ``own_code`` it may import what a PYTHONPATH has of the folder.
    """
    import anyio

    request = _request(words, text, own_code=own_code)
    process = await _started(cwd, own_code=own_code)
    out, err = Kept(), Kept()
    _RUNNING[process.pid] = process
    try:
        with anyio.fail_after(seconds):
            async with anyio.create_task_group() as group:
                for stream, kept in ((process.stdout, out), (process.stderr, err)):
                    if stream is not None:
                        group.start_soon(_drain, stream, kept)
                await _feed(process, request)
                code = await process.wait()
                # What it has started may hold its streams open: they end with it, or are not waited for.
                _kill(process)
                group.cancel_scope.deadline = anyio.current_time() + LAST_WORDS
    except TimeoutError:
        raise BadInput(f"ampwise {words[0]} took longer than {seconds:g} seconds, and was stopped.") from None
    finally:
        await _end(process)
    return Ended(code=code, out=out.text(), err=err.text())


def _request(words: Sequence[Word], text: str | None, *, own_code: bool) -> bytes:
    """What ``mcp_worker`` reads."""
    for word in words:
        if isinstance(word, str) and (len(word) > LONGEST_WORD or "\0" in word):
            raise BadInput(f"ampwise {words[0]}: arguments of up to {LONGEST_WORD:,} characters without NUL are taken.")
    plain = [word if isinstance(word, str) else asdict(word) for word in words]
    return json.dumps({"words": plain, "text": text, "own_code": own_code}).encode()


async def _started(cwd: Path, *, own_code: bool) -> Process:
    import anyio

    try:
        return await anyio.open_process(
            list(PYTHON),
            cwd=cwd,
            env=_environment(cwd, own_code=own_code),
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that what it starts ends with it
        )
    except OSError as error:  # the folder is gone, or the machine has no process left
        raise BadInput(f"no process could be started in {cwd}: {error.strerror or error}.") from None


def _environment(cwd: Path, *, own_code: bool) -> dict[str, str]:
    """Ours, but no program, library or module is looked for in the folder, as by an empty part of PATH it would.

    Nor below the folder, unless its code may be run; but for where ampwise itself is.
    """
    found = os.environ | PLAIN
    if not own_code:
        found |= {name: absolute_parts(found[name], outside=str(cwd)) for name in SEARCHED if name in found}
    paths = [Path(each).resolve() for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    kept = [each for each in paths if each != cwd and (own_code or each == HOME or not each.is_relative_to(cwd))]
    found["PYTHONPATH"] = os.pathsep.join(map(str, kept))
    # One that is empty would mean the current folder again.
    return {name: value for name, value in found.items() if value or name not in (*SEARCHED, "PYTHONPATH")}


async def _feed(process: Process, request: bytes) -> None:
    import anyio

    if process.stdin is None:
        return
    with contextlib.suppress(anyio.BrokenResourceError):  # it ended without reading all of it
        await process.stdin.send(request)
    await process.stdin.aclose()


async def _drain(stream: ByteReceiveStream, kept: Kept) -> None:
    async for data in stream:
        kept.add(data)


async def _end(process: Process) -> None:
    """Nothing of it is left: also when the agent called the request off."""
    import anyio

    _kill(process)
    _RUNNING.pop(process.pid, None)
    with anyio.CancelScope(shield=True):
        await process.aclose()


def end_all() -> None:
    """End what runs now, at once."""
    for process in list(_RUNNING.values()):
        _kill(process)


def _kill(process: Process) -> None:
    """End it and its children, which may be there when it is not."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
