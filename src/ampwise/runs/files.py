"""Files that are consistent at any moment: replaced atomically, or appended to in full lines."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ampwise.finding.strict_json import loads

TEMPORARY_SUFFIX = ".new"  # suffix of a file until it is complete
WRITING_SHARE = 0.01  # largest fraction of the time spent in write()
LONGEST_WAIT_S = 1.0  # that a line stays in memory
LONGEST_LINE = 64_000_000  # bytes
LONG_NUMBER = re.compile(rb"[0-9]{300}")  # would overflow as a float


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write a file atomically; return the number of pieces and bytes. A kill leaves the old file or the new one."""
    aside = path.with_name(path.name + TEMPORARY_SUFFIX)
    count = size = 0
    try:
        with open_regular(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb") as file:
            for piece in pieces:
                file.write(piece)
                count, size = count + 1, size + len(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)  # noqa: PTH105 (tests patch this name)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    return count, size


def read_json(path: Path, largest: int) -> Any:
    """Read a JSON file; raise ValueError if it is invalid or has more than ``largest`` bytes."""
    with open_regular(path, os.O_RDONLY, "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    if LONG_NUMBER.search(data):
        raise ValueError("it has a number of 300 digits or more")
    return loads(data)


def open_regular(path: Path, flags: int, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a regular file; raise OSError for a link, or a pipe that would block."""
    if path.is_symlink():
        raise OSError(f"{path.name} is a link")
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, mode, buffering=buffering)


def _write_all(file: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


class AppendOnlyFile:
    """File to which lines are appended. Lines passed to the operating system survive the process.

    Each line is written at once as long as that takes no more than 1% of the time, as on a local disk; if it takes
    longer, several lines are buffered and written together.
    """

    def __init__(self, path: Path, *, buffer_bytes: int) -> None:
        self.path = path
        self.lines = self.bytes = 0  # in the file
        self.dead = False  # a write failed, and nothing more is written
        self._buffer_bytes = buffer_bytes
        self._buffered: list[str] = []
        self._buffered_size = 0
        self._due = 0.0
        self._aside = path.with_name(path.name + TEMPORARY_SUFFIX)
        self._rewriting: Iterator[None] | None = None  # begun by rewrite_some
        self._finishing = False
        self._file = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb", buffering=0)

    def add(self, line: str) -> bool:
        """Append a line that ends in a newline; return whether it is already in the file."""
        if self.dead:
            return False
        self._buffered.append(line)
        self._buffered_size += len(line)
        if time.perf_counter() < self._due and self._buffered_size < self._buffer_bytes:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write the buffered lines."""
        if self.dead or not self._buffered:
            return
        began = time.perf_counter()
        lines, self._buffered, self._buffered_size = self._buffered, [], 0
        data = "".join(lines).encode()
        with self._dead_on_error():
            _write_all(self._file, data)
        self.lines += len(lines)
        self.bytes += len(data)
        now = time.perf_counter()
        self._due = now + min((now - began) / WRITING_SHARE, LONGEST_WAIT_S)

    def rewrite(self, change: Callable[[Iterable[bytes]], Iterable[bytes]]) -> None:
        """Replace the file's lines by the result of ``change``, and continue appending to it."""
        self.flush()
        with self._dead_on_error():
            self._finishing = True
            for _ in self._rewriting or self._rewrite(change):
                pass
            self._rewriting, self._finishing = None, False

    def rewrite_some(self, change: Callable[[Iterable[bytes]], Iterable[bytes]]) -> None:
        """Prepare one line of the next ``rewrite`` with the same ``change``; other lines can be added in between.

        ``change`` gets an empty line where there are no more lines yet, and passes it on.
        """
        self.flush()
        with self._dead_on_error():
            if self._rewriting is None:
                self._rewriting = self._rewrite(change)
            next(self._rewriting)

    def _rewrite(self, change: Callable[[Iterable[bytes]], Iterable[bytes]]) -> Iterator[None]:
        lines = size = 0
        # Not buffered: a process that is forked meanwhile must not write a copy of the buffer when it ends.
        with open_regular(self._aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb", buffering=0) as file:
            for line in change(self._read_lines()):
                _write_all(file, line)
                lines, size = lines + bool(line), size + len(line)
                yield
            os.fsync(file.fileno())
        os.replace(self._aside, self.path)  # noqa: PTH105 (tests patch this name)
        self.lines, self.bytes = lines, size
        self._file.close()
        self._file = open_regular(self.path, os.O_WRONLY | os.O_APPEND, "wb", buffering=0)

    def _read_lines(self) -> Iterator[bytes]:
        with open_regular(self.path, os.O_RDONLY, "rb") as file:  # closed after the last line, before it is replaced
            while (line := file.readline(LONGEST_LINE)) or not self._finishing:
                yield line

    def close(self) -> None:
        """Write the buffered lines and close the file."""
        try:
            self.flush()
        finally:
            self.dead = True
            self._file.close()
            self._abandon_rewriting()

    def _abandon_rewriting(self) -> None:
        self._rewriting, self._finishing = None, False
        with contextlib.suppress(OSError):
            self._aside.unlink()

    @contextlib.contextmanager
    def _dead_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.dead |= isinstance(error, OSError)
            self._abandon_rewriting()
            raise
