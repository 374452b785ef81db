"""Files of a record, read again only as far as they are others than at the last look.

Nothing stays open between two looks, and nothing is locked: whoever writes does not notice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Generic, NamedTuple, TypeVar

from ampwise.record.files import opened
from ampwise.record.lines import BROKEN

__all__ = ["Limits", "Tail", "Whole"]

SETTLED_S = 2.0  # a file system's clock ticks in milliseconds at best, in seconds at worst

Read = TypeVar("Read")


class Limits(NamedTuple):
    """How much of a file is read: what a line becomes in memory is many times its length."""

    bytes: int
    line: int  # bytes of one
    lines: int


class Tail(Generic[Read]):
    """What the lines of a file say that grows at its end, and is now and then replaced by a shorter one."""

    def __init__(self, path: Path, read: Callable[[bytes], Read], limits: Limits) -> None:
        self.path = path
        self._read, self._limits = read, limits
        self._stamp: _Stamp | None = None
        self._problem = ""  # why nothing can be read
        self._times = 0  # that it was begun
        self._begin_anew()

    def look(self) -> bool:
        """Read what was added; whether the file says something else now."""
        if self._stamp is not None and self._stamp.holds_for(self.path):
            return False
        before = self._state()
        self._stamp, self._problem = None, ""
        try:
            with opened(self.path, os.O_RDONLY, "rb") as file:
                self._stamp = _Stamp.of(os.fstat(file.fileno()))
                self._read_on(file)
        except FileNotFoundError:
            self._begin_anew()
            self._problem = f"{self.path.name} is missing."
        except (OSError, ValueError) as error:
            if self._stamp is None:  # not even opened
                self._begin_anew()
            self._stamp, self._problem = None, f"{self.path.name} cannot be read: {error}."
        return before != self._state()

    @property
    def values(self) -> list[Read]:
        """Of each line that makes sense, also of a last one that lacks no more than its end."""
        return [*self._values, *self._last]

    @property
    def trouble(self) -> list[str]:
        """What is to be said of the lines that make no sense; of one at the end that was never finished, nothing."""
        said = [self._problem] if self._problem else []
        if self._broken:
            said.append(
                f"{self.path.name}: {self._broken} of {self._number + self._has_unfinished} lines cannot be read and "
                f"were left out, the first of them line {self._first_broken}."
            )
        return said

    def _begin_anew(self) -> None:
        self._values: list[Read] = []
        self._last: list[Read] = []  # of a line without its end, or nothing
        self._has_unfinished = False
        self._identity = (0, 0)
        self._offset = 0  # of the first byte after the whole lines
        self._last_line = b""
        self._number = self._broken = self._first_broken = 0  # of lines
        self._times += 1

    def _read_on(self, file: IO[bytes]) -> None:
        stat = os.fstat(file.fileno())
        if stat.st_size > self._limits.bytes:
            self._begin_anew()
            raise ValueError(f"it has more than {self._limits.bytes:,} bytes")
        if not self._goes_on(file, stat):
            self._begin_anew()
        self._identity, self._last, self._has_unfinished = (stat.st_dev, stat.st_ino), [], False
        file.seek(self._offset)
        while line := file.readline(self._limits.line):
            if self._number == self._limits.lines:
                raise ValueError(f"it has more than {self._number:,} lines, and what comes after these was left out")
            if not line.endswith(b"\n") and len(line) < self._limits.line:
                self._keep_unfinished(line)
                return
            self._take(line)

    def _goes_on(self, file: IO[bytes], stat: os.stat_result) -> bool:
        """Whether it is the file that was read before, with more at its end.

        A replaced file has another number, but numbers are given again: the last line has to be where it was, too.
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
        except BROKEN:
            if line.endswith(b"\n"):
                self._broken += 1
                self._first_broken = self._first_broken or self._number

    def _keep_unfinished(self, line: bytes) -> None:
        """Its rest may come: it is read again at the next look."""
        self._has_unfinished = True
        try:
            self._last = [self._read(line)]
        except BROKEN:
            self._last = []

    def _state(self) -> tuple[object, ...]:
        return (self._times, self._offset, self._last, self._has_unfinished, self._problem)


class Whole(Generic[Read]):
    """What is made of a file that is replaced as a whole; made again when the file is another."""

    def __init__(self, path: Path, read: Callable[[], Read]) -> None:
        self.path = path
        self._read = read
        self._stamp: _Stamp | None = None
        self._values: list[Read] = []  # one, once it was read

    def look(self) -> bool:
        """Read it if it is another; whether it says something else now. What reading raises comes through."""
        if self._values and self._stamp is not None and self._stamp.holds_for(self.path):
            return False
        stamp = _Stamp.of_opened(self.path)  # before it is read: what comes meanwhile is seen the next time
        values = [self._read()]
        self._stamp, before, self._values = stamp, self._values, values
        return before != values

    @property
    def value(self) -> Read:
        """That of the last look."""
        return self._values[0]


class _Stamp(NamedTuple):
    """By which one tells a file from a later one."""

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
        """None for one that cannot be opened now: it may be read later without being another."""
        try:
            with opened(path, os.O_RDONLY, "rb") as file:
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
        """Whether nothing was written since.

        Of a file that had just been written when this was taken, nobody can tell: the next write may bear its time.
        """
        if self.taken_s - self.modified_ns / 1e9 < SETTLED_S:
            return False
        now = _Stamp.at(path)
        return now is not None and now[:4] == self[:4]
