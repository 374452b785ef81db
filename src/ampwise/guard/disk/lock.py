"""One run to a directory: a second is refused, and the lock of a process that died is taken over.

The system's own lock (flock) is let go of when its process ends, however it ends. Where a file system has none, the
holder says that it lives by touching the file, and age is told by that file system's clock alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ampwise.errors import BadInput
from ampwise.guard.disk.layout import LOCK
from ampwise.printers.terminal import printable
from ampwise.record.files import opened, write_aside

__all__ = ["Lock"]

LARGEST = 10_000  # bytes
HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
BEAT_S = 20.0  # between signs of life, where there is no flock
DEAD_AFTER_S = 120.0  # without one
UNTOLD = "?"  # when a process began, where the system does not say
SETTLED_AFTER_S = 0.3  # in which another that takes over in the same moment would show


class _Held(Protocol):
    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Holder(NamedTuple):
    """Who has a lock, or had it, by its own words."""

    pid: int = 0
    host: str = "?"
    since: str = ""


class Lock:
    """``acquire`` or BadInput; ``stale`` says whether it was taken over from a run that did not let go of it."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._path = self._directory / LOCK
        self._file: _Held | None = None
        self._mine = ""  # what tells this lock from one of the same process
        self._stopped = threading.Event()
        self.stale = False
        self.holder_before = Holder()  # of one that is stale

    @property
    def held(self) -> bool:
        return bool(self._mine)

    def acquire(self) -> None:
        """Make the directory this run's own; BadInput says who has it."""
        if self.held:
            raise BadInput(f"{self._directory} is locked by this run already.")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise BadInput(
                f"{self._directory} cannot be locked: {error.strerror or error}. Name a folder that may be written to."
            ) from error

    def release(self) -> None:
        """Let go of it; nothing where it is not held."""
        if not self.held:
            return
        self._mine = ""
        self._stopped.set()
        with contextlib.suppress(OSError):
            # Emptied, not removed: who waits for this very file would otherwise lock one that has no name.
            if self._file is not None:
                os.ftruncate(self._file.fileno(), 0)
            else:
                self._path.unlink()
        self._close()

    def _acquire(self) -> None:
        file = opened(self._path, os.O_RDWR | os.O_CREAT, "r+b", buffering=0)
        try:
            locked = _flock(file.fileno())
            holder = _parsed(file.read(LARGEST))
            if locked is False or (locked is None and _lives(holder, self._path)):
                raise BadInput(_refusal(self._directory, holder))
            facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time(), "born": _born_here()}
            self._mine = facts["token"] = secrets.token_hex(8)
            text = json.dumps(facts).encode()
            if locked:
                self._file = file
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), text, 0)
                _HELD_HERE.add(self)
            else:
                self._take_without_flock(text)
        except BaseException:
            self._mine, self._file = "", None
            file.close()
            raise
        if not locked:
            file.close()
        self.stale, self.holder_before = bool(holder), _told(holder)

    def _take_without_flock(self, text: bytes) -> None:
        # Under a name of its own first: another may take over in this very moment, and the last one has it.
        aside = self._path.with_name(f"{LOCK}.{self._mine}.new")
        write_aside(aside, [text])
        os.replace(aside, self._path)  # noqa: PTH105
        time.sleep(SETTLED_AFTER_S)
        holder = _parsed(self._path.read_bytes()[:LARGEST])
        if holder.get("token") != self._mine:
            raise BadInput(_refusal(self._directory, holder))
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, args=(self._stopped,), name="ampwise-guard-lock", daemon=True).start()

    def _beat(self, stopped: threading.Event) -> None:
        while not stopped.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_HELD_HERE: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_in_child() -> None:
    """A lock is shared with what is forked: a loader's worker that outlives a killed run would go on holding it."""
    for lock in list(_HELD_HERE):
        lock._close()
        lock._mine = ""
    _HELD_HERE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _flock(descriptor: int) -> bool | None:
    """Whether it is ours now; None where there are no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            return False
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def _parsed(data: bytes) -> dict[str, Any]:
    """What the holder said of itself; nothing where nobody holds it."""
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return {"unknown": True} if data.strip() else {}
    return facts if isinstance(facts, dict) else {"unknown": True}


def _lives(holder: dict[str, Any], path: Path) -> bool:
    """Whether a holder, of which no lock of the system tells, is still there."""
    if not holder:
        return False
    if os.name == "posix" and holder.get("host") == socket.gethostname() and isinstance(holder.get("pid"), int):
        born = _born(holder["pid"])
        return born is not None and holder.get("born") in (born, UNTOLD)
    probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with opened(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb") as file:
            now = os.fstat(file.fileno()).st_mtime
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return now - path.stat().st_mtime < DEAD_AFTER_S


def _born(pid: int) -> str | None:
    """When a process began, so that another of the same number is not taken for it; None if there is none."""
    try:
        os.kill(pid, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:  # another user's
        pass
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return UNTOLD


def _born_here() -> str | None:
    return _born(os.getpid()) if os.name == "posix" else UNTOLD  # elsewhere, to ask is to end it


def _told(holder: dict[str, Any]) -> Holder:
    pid, since = holder.get("pid"), holder.get("since")
    when = ""
    if isinstance(since, int | float) and 0 < since < 2**33:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    return Holder(pid if isinstance(pid, int) else 0, str(holder.get("host", "?"))[:200], when)


def _refusal(directory: Path, holder: dict[str, Any]) -> str:
    since = _told(holder).since
    when = f" since {since}" if since else ""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
    return (
        f"{directory} is in use by {printable(str(who))[:200]}{when}. Two runs would overwrite each other: "
        "name another folder, or end that run first."
    )
