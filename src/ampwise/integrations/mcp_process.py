"""A verb in a process of its own: it can be stopped, and what it says is bounded and never part of the protocol."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ampwise.errors import BadInput

if TYPE_CHECKING:
    from anyio.abc import ByteReceiveStream, Process

__all__ = ["Ended", "Kept", "Launch", "launch"]

ROOM = 4_000_000  # bytes of what a process says that are kept, of each stream
# -P: without it Python would look for modules in the folder, and a json.py there would be run.
PYTHON = (sys.executable, "-P", "-m", "ampwise")
PLAIN = {"NO_COLOR": "1", "COLUMNS": "110"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What came of it."""

    code: int
    out: str
    err: str


class Launch(Protocol):
    """How a verb is run."""

    async def __call__(self, words: Sequence[str], *, cwd: Path, seconds: float, text: str | None = None) -> Ended: ...


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


async def launch(words: Sequence[str], *, cwd: Path, seconds: float, text: str | None = None) -> Ended:
    """Run ``ampwise`` with these words; BadInput when it takes too long."""
    import anyio

    process = await anyio.open_process(
        [*PYTHON, *words],
        cwd=cwd,
        env=_environment(cwd),
        stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
        start_new_session=True,  # so that what it starts ends with it
    )
    out, err = Kept(), Kept()
    try:
        with anyio.fail_after(seconds):
            async with anyio.create_task_group() as group:
                for stream, kept in ((process.stdout, out), (process.stderr, err)):
                    if stream is not None:
                        group.start_soon(_drain, stream, kept)
                await _feed(process, text)
            code = await process.wait()
    except TimeoutError:
        raise BadInput(f"ampwise {words[0]} took longer than {seconds:g} seconds, and was stopped.") from None
    finally:
        await _end(process)
    return Ended(code=code, out=out.text(), err=err.text())


def _environment(cwd: Path) -> dict[str, str]:
    """Ours, but with a PYTHONPATH that does not have the folder in it, as by an empty part it would."""
    paths = [Path(each).resolve() for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return os.environ | PLAIN | {"PYTHONPATH": os.pathsep.join(str(each) for each in paths if each != cwd)}


async def _feed(process: Process, text: str | None) -> None:
    import anyio

    if text is None or process.stdin is None:
        return
    with contextlib.suppress(anyio.BrokenResourceError):  # it ended without reading all of it
        await process.stdin.send(text.encode("utf-8", "surrogatepass"))
    await process.stdin.aclose()


async def _drain(stream: ByteReceiveStream, kept: Kept) -> None:
    async for data in stream:
        kept.add(data)


async def _end(process: Process) -> None:
    """Nothing of it is left: also when the agent called the request off."""
    import anyio

    if process.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    with anyio.CancelScope(shield=True):
        await process.aclose()
