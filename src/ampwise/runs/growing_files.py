"""Files of a growing record, of which only the changes since the last look are read.

Files are not kept open between two looks, and not locked, so the writer is not disturbed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Generic, NamedTuple, TypeVar

from ampwise.runs.files import open_regular
from ampwise.runs.json_lines import LINE_ERRORS

__all__ = ["GrowingLines", "ReadLimits", "ReplacedFile"]

SETTLED_S = 2.0  # resolution of file times: milliseconds at best, seconds at worst

Read = TypeVar("Read")


class ReadLimits(NamedTuple):
    """Limits on how much of a file is read: in memory, a line takes many times its length."""

    bytes: int
    line: int  # bytes of one line
    lines: int


class GrowingLines(Generic[Read]):
    """Values read from the lines of a file that grows, and is sometimes replaced by a shorter one."""

    def __init__(
        self, path: Path, read: Callable[[bytes], Read], limits: ReadLimits, *, optional: bool = False
    ) -> None:
        self.path = path
        self._optional = optional  # without the file there are no values, which is no problem
        self._read, self._limits = read, limits
        self._stamp: _Stamp | None = None
        self._problem = ""  # why nothing can be read
        self._times = 0  # how often reading started from the beginning
        self._start_over()

    def look(self) -> bool:
        """Read what was added; return whether the values have changed."""
        if self._stamp is not None and self._stamp.holds_for(self.path):
            return False
        if self._optional and self._identity == (0, 0) and not self._problem and not os.path.lexists(self.path):
            return False
        before = self._state()
        self._stamp, self._problem = None, ""
        try:
            with open_regular(self.path, os.O_RDONLY, "rb") as file:
                self._stamp = _Stamp.of(os.fstat(file.fileno()))
                self._read_more(file)
        except FileNotFoundError:
            self._start_over()
            self._problem = "" if self._optional else f"{self.path.name} is missing."
        except (OSError, ValueError) as error:
            if self._stamp is None:  # it could not be opened
                self._start_over()
            self._stamp, self._problem = None, f"{self.path.name} cannot be read: {error}."
        return before != self._state()

    @property
    def values(self) -> list[Read]:
        """Values of all valid lines, including a last line without a newline."""
        return [*self._values, *self._last]

    @property
    def trouble(self) -> list[str]:
        """Messages about invalid lines; an unfinished line at the end is not reported."""
        trouble = [self._problem] if self._problem else []
        if self._broken:
            trouble.append(
                f"{self.path.name}: {self._broken} of {self._number + self._has_unfinished} lines cannot be read and "
                f"were ignored; the first is line {self._first_broken}."
            )
        return trouble

    def _start_over(self) -> None:
        self._values: list[Read] = []
        self._last: list[Read] = []  # value of an unfinished last line, if valid
        self._has_unfinished = False
        self._identity = (0, 0)
        self._offset = 0  # end of the last complete line
        self._last_line = b""
        self._number = self._broken = self._first_broken = 0  # of lines
        self._times += 1

    def _read_more(self, file: IO[bytes]) -> None:
        stat = os.fstat(file.fileno())
        if stat.st_size > self._limits.bytes:
            self._start_over()
            raise ValueError(f"it has more than {self._limits.bytes:,} bytes")
        if not self._is_continued(file, stat):
            self._start_over()
        self._identity, self._last, self._has_unfinished = (stat.st_dev, stat.st_ino), [], False
        file.seek(self._offset)
        while line := file.readline(self._limits.line):
            if self._number == self._limits.lines:
                raise ValueError(f"it has more than {self._number:,} lines, and the rest was ignored")
            if not line.endswith(b"\n") and len(line) < self._limits.line:
                self._keep_unfinished(line)
                return
            self._take(line)

    def _is_continued(self, file: IO[bytes], stat: os.stat_result) -> bool:
        """Whether this is the file that was read before, possibly with more lines.

        A replaced file has another inode, but inodes are reused: the last line must also be where it was.
        """
        if (stat.st_dev, stat.st_ino) != self._identity:
            return False
        file.seek(self._offset - len(self._last_line))
        return file.read(len(self._last_line)) == self._last_line

    def _take(self, line: bytes) -> None:
        self._number += 1
        self._offset += len(line)
        self._last_line = line
        try:
            self._values.append(self._read(line))
        except LINE_ERRORS:
            if line.endswith(b"\n"):
                self._broken += 1
                self._first_broken = self._first_broken or self._number

    def _keep_unfinished(self, line: bytes) -> None:
        """Read an unfinished line; it is read again at the next look."""
        self._has_unfinished = True
        try:
            self._last = [self._read(line)]
        except LINE_ERRORS:
            self._last = []

    def _state(self) -> tuple[object, ...]:
        return (self._times, self._offset, self._last, self._has_unfinished, self._problem)


class ReplacedFile(Generic[Read]):
    """Value read from a file that is always replaced atomically; read again when the file has changed."""

    def __init__(self, path: Path, read: Callable[[], Read]) -> None:
        self.path = path
        self._read = read
        self._stamp: _Stamp | None = None
        self._values: list[Read] = []  # one value, once it has been read

    def look(self) -> bool:
        """Read the file if it has changed; return whether the value has. Errors of reading are raised."""
        if self._values and self._stamp is not None and self._stamp.holds_for(self.path):
            return False
        stamp = _Stamp.of_opened(self.path)  # before reading, so that later changes are seen next time
        values = [self._read()]
        self._stamp, before, self._values = stamp, self._values, values
        return before != values

    @property
    def value(self) -> Read:
        """The value at the last look."""
        return self._values[0]


class _Stamp(NamedTuple):
    """Identity, size and time of a file, to detect changes."""

    device: int
    inode: int
    size: int
    modified_ns: int
    taken_s: float

    @classmethod
    def of(cls, stat: os.stat_result) -> _Stamp:
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, time.time())

    @classmethod
    def of_opened(cls, path: Path) -> _Stamp | None:
        """Return the stamp of a file; None if it cannot be opened now, since it may be readable later unchanged."""
        try:
            with open_regular(path, os.O_RDONLY, "rb") as file:
                return cls.of(os.fstat(file.fileno()))
        except (OSError, ValueError):
            return None

    @classmethod
    def at(cls, path: Path) -> _Stamp | None:
        try:
            return cls.of(path.lstat())
        except OSError:
            return None

    def holds_for(self, path: Path) -> bool:
        """Whether the file has not changed since.

        False for a file written just before the stamp was taken: the next write may have the same time.
        """
        if self.taken_s - self.modified_ns / 1e9 < SETTLED_S:
            return False
        now = _Stamp.at(path)
        return now is not None and now[:4] == self[:4]
