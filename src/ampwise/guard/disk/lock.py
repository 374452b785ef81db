"""A lock that allows one run per directory, and takes over the lock of a process that died.

The operating system releases a flock when its process ends, however it ends. On a file system without flock, the holder
touches the file regularly, and its age is measured with that file system's clock.
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
from typing import IO, Any, NamedTuple

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable
from ampwise.guard.disk.manifest import LOCK
from ampwise.runs.files import open_regular, write_atomically

LARGEST = 10_000  # bytes
HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
BEAT_S = 20.0  # between two touches of the file, without flock
DEAD_AFTER_S = 120.0  # without a touch
UNKNOWN_START = "?"  # start time of a process, if the system does not report it
SETTLED_AFTER_S = 0.3  # time in which another process that takes over at the same moment would show up


class LockHolder(NamedTuple):
    """The process that holds or held a lock, as it described itself."""

    pid: int = 0
    host: str = "?"
    since: str = ""


class DirectoryLock:
    """Lock on a directory. ``stale``: whether it was taken over from a run that did not release it."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._path = self._directory / LOCK
        self._file: IO[bytes] | None = None
        self._token = ""  # distinguishes this lock from others of the same process
        self._stopped = threading.Event()
        self.stale = False
        self.holder_before = LockHolder()  # of a stale lock

    @property
    def held(self) -> bool:
        return bool(self._token)

    def acquire(self) -> None:
        """Lock the directory; raise BadInput, naming the holder, if another run has it."""
        if self.held:
            raise BadInput(f"{self._directory} is already locked by this run.")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise BadInput(
                f"{self._directory} cannot be locked: {error.strerror or error}. Name a writable folder."
            ) from error

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if not self.held:
            return
        self._token = ""
        self._stopped.set()
        with contextlib.suppress(OSError):
            # Truncate, do not remove: another process that has the file open could lock a file without a name.
            if self._file is not None:
                os.ftruncate(self._file.fileno(), 0)
            else:
                self._path.unlink()
        self._close()

    def _acquire(self) -> None:
        file = open_regular(self._path, os.O_RDWR | os.O_CREAT, "r+b", buffering=0)
        try:
            locked = _flock(file.fileno())
            holder = _parsed(file.read(LARGEST))
            if locked is False or (locked is None and _lives(holder, self._path)):
                raise BadInput(_refusal(self._directory, holder))
            born = _born(os.getpid()) if os.name == "posix" else UNKNOWN_START  # on Windows os.kill would end it
            facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time(), "born": born}
            self._token = facts["token"] = secrets.token_hex(8)
            text = json.dumps(facts).encode()
            if locked:
                self._file = file
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), text, 0)
                _HELD_HERE.add(self)
            else:
                self._take_without_flock(text)
        except BaseException:
            self._token, self._file = "", None
            file.close()
            raise
        if not locked:
            file.close()
        self.stale, self.holder_before = bool(holder), _holder_of(holder)

    def _take_without_flock(self, text: bytes) -> None:
        # Write a file of our own and rename it: if two processes take over at the same time, the last one wins.
        aside = self._path.with_name(f"{LOCK}.{self._token}.new")
        write_atomically(aside, [text])
        os.replace(aside, self._path)  # noqa: PTH105
        time.sleep(SETTLED_AFTER_S)
        holder = _parsed(self._path.read_bytes()[:LARGEST])
        if holder.get("token") != self._token:
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


_HELD_HERE: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close locks in a forked process: a loader worker that outlives a killed run would keep holding the flock."""
    for lock in list(_HELD_HERE):
        lock._close()
        lock._token = ""
    _HELD_HERE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _flock(descriptor: int) -> bool | None:
    """Try to lock a file; return whether that succeeded, None if flock is not supported."""
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
    """Return the holder's description of itself; empty if nobody holds the lock."""
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return {"unknown": True} if data.strip() else {}
    return facts if isinstance(facts, dict) else {"unknown": True}


def _lives(holder: dict[str, Any], path: Path) -> bool:
    """Whether the holder of a lock without flock is still running."""
    if not holder:
        return False
    if os.name == "posix" and holder.get("host") == socket.gethostname() and isinstance(holder.get("pid"), int):
        born = _born(holder["pid"])
        return born is not None and holder.get("born") in (born, UNKNOWN_START)
    probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open_regular(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb") as file:
            now = os.fstat(file.fileno()).st_mtime
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return now - path.stat().st_mtime < DEAD_AFTER_S


def _born(pid: int) -> str | None:
    """Return the start time of a process, to detect a reused pid; None if there is no such process."""
    try:
        os.kill(pid, 0)  # checks only
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:  # another user's
        pass
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return UNKNOWN_START


def _holder_of(holder: dict[str, Any]) -> LockHolder:
    pid, since = holder.get("pid"), holder.get("since")
    when = ""
    if isinstance(since, int | float) and 0 < since < 2**33:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    return LockHolder(pid if isinstance(pid, int) else 0, str(holder.get("host", "?"))[:200], when)


def _refusal(directory: Path, holder: dict[str, Any]) -> str:
    since = _holder_of(holder).since
    when = f" since {since}" if since else ""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
    return (
        f"{directory} is in use by {printable(str(who))[:200]}{when}. Two runs would overwrite each other: "
        "name another folder, or stop that run first."
    )
