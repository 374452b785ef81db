"""Files that are whole at any moment: written aside and put in place, or grown by whole lines."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ampwise.strict_json import loads

__all__ = ["ASIDE", "LONGEST_LINE", "GrowingFile", "opened", "read_json", "read_lines", "write_aside"]

ASIDE = ".new"  # what is added to the name of a file until it is whole
WRITING_SHARE = 0.01  # of the time, at most, is spent in handing lines to the system
LONGEST_WAIT_S = 1.0  # of a line in memory, when another comes after it
LONGEST_LINE = 64_000_000  # bytes
LONG_NUMBER = re.compile(rb"[0-9]{300}")  # as a float, it would overflow


def write_aside(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write a file and put it in place at once; how many pieces and bytes it has. A kill leaves the old or the new."""
    aside = path.with_name(path.name + ASIDE)
    count = size = 0
    try:
        with opened(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb") as file:
            for piece in pieces:
                file.write(piece)
                count, size = count + 1, size + len(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)  # noqa: PTH105 (a name that tests can make fail)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    return count, size


def read_json(path: Path, largest: int) -> Any:
    """What a JSON file holds; ValueError where it holds none, or more than ``largest`` bytes."""
    with opened(path, os.O_RDONLY, "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    if LONG_NUMBER.search(data):
        raise ValueError("it has a number that is too long to compute with")
    return loads(data)


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one at a time."""
    with opened(path, os.O_RDONLY, "rb") as file:
        while line := file.readline(LONGEST_LINE):
            yield line


def opened(path: Path, flags: int, mode: str, buffering: int = -1) -> IO[bytes]:
    """A plain file: no link to another place, no pipe that one would wait for."""
    if path.is_symlink():
        raise OSError(f"{path.name} is a link")
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path.name} is not a plain file")
    return os.fdopen(descriptor, mode, buffering=buffering)


class GrowingFile:
    """Lines, added at the end. What was handed to the system survives the process.

    Every line is handed over at once as long as that takes a hundredth of the time, as it does on a local disk beside
    any training; where it takes longer, several lines wait for each other.
    """

    def __init__(self, path: Path, *, buffer_bytes: int) -> None:
        self.path = path
        self.lines = self.bytes = 0  # in the file
        self.dead = False  # it could not be written, and nothing is tried again
        self._buffer_bytes = buffer_bytes
        self._waiting: list[str] = []
        self._waiting_size = 0
        self._due = 0.0
        self._file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb", buffering=0)

    def add(self, line: str) -> bool:
        """Whether the line, which ends in a newline, is in the file already."""
        if self.dead:
            return False
        self._waiting.append(line)
        self._waiting_size += len(line)
        if time.perf_counter() < self._due and self._waiting_size < self._buffer_bytes:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Hand over what waits."""
        if self.dead or not self._waiting:
            return
        began = time.perf_counter()
        lines, self._waiting, self._waiting_size = self._waiting, [], 0
        data = "".join(lines).encode()
        with self._dying():
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        self.lines += len(lines)
        self.bytes += len(data)
        now = time.perf_counter()
        self._due = now + min((now - began) / WRITING_SHARE, LONGEST_WAIT_S)

    def rewrite(self, change: Callable[[Iterable[bytes]], Iterable[bytes]]) -> None:
        """Put in place what ``change`` makes of the lines, and go on at its end."""
        self.flush()
        with self._dying():
            self.lines, self.bytes = write_aside(self.path, change(read_lines(self.path)))
            self._file.close()
            self._file = opened(self.path, os.O_WRONLY | os.O_APPEND, "wb", buffering=0)

    def close(self) -> None:
        """Hand over what waits, and add no more."""
        try:
            self.flush()
        finally:
            self.dead = True
            self._file.close()

    @contextlib.contextmanager
    def _dying(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.dead = True
            raise
