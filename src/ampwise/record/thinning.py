"""Fewer points as a run ages: lines of a file in, fewer lines out, one at a time, so that memory stays flat.

What is no JSON in a file stays out of the thinned one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ampwise.record.bucket import together
from ampwise.record.lines import (
    BROKEN,
    added_layers,
    bucket_line,
    bucket_of,
    bucket_of_singles,
    object_line,
    read_object,
)

__all__ = ["Limits", "bucket_size", "thinned_layers", "thinned_steps"]

MOST_AT_ONCE = 256  # lines in memory; a bucket of more is made in several goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of a run is kept. With these, a record of 300 tensors stays under 200 MB however long the run."""

    rows: int = 50_000  # lines of steps.jsonl, at which the older ones are merged
    samples: int = 512  # lines of layers.jsonl, at which neighbours are merged
    layer_bytes: int = 96_000_000  # the same for a model of very many tensors, from sixteen samples on
    buffer_bytes: int = 256_000  # that may wait in memory

    @property
    def recent_rows(self) -> int:
        """The newest steps, which stay as they are."""
        return self.rows // 4


def bucket_size(old_steps: int, limits: Limits) -> int:
    """How many steps to keep as one, for the older part of a run to take a quarter of the lines; a power of two.

    A power of two, so that buckets double, and a run is equally dense from its start to its recent steps.
    """
    wanted = max(1, limits.rows // 4)
    needed = -(-old_steps // wanted)
    return 1 << (needed - 1).bit_length() if needed > 1 else 1


def thinned_steps(lines: Iterable[bytes], *, old: int, size: int) -> Iterator[bytes]:
    """The first ``old`` lines as buckets of up to ``size`` steps, and the others as they are."""
    remaining = iter(lines)
    groups: dict[int, _Group] = {}  # by optimizer: those of two networks take turns
    for line in itertools.islice(remaining, old):
        try:
            data = read_object(line)
            count, optimizer = int(data.get("k", 1)), int(data.get("o", 0))
        except BROKEN:
            continue
        group = groups.setdefault(optimizer, _Group())
        if group.count + count > size:
            yield from group.taken()
        group.add(data, count, line)
    for group in groups.values():
        yield from group.taken()
    yield from remaining


class _Group:
    """Lines that will be one."""

    __slots__ = ("count", "lines", "parsed")

    def __init__(self) -> None:
        self.count = 0  # of steps
        self.lines: list[bytes] = []
        self.parsed: list[dict[str, Any]] = []

    def add(self, data: dict[str, Any], count: int, line: bytes) -> None:
        self.parsed.append(data)
        self.lines.append(line)
        self.count += count
        if len(self.lines) >= MOST_AT_ONCE:
            self.lines = self._merged()
            self.parsed = [read_object(line) for line in self.lines]

    def taken(self) -> list[bytes]:
        """The line of all of them, and none are left."""
        lines = self._merged()
        self.lines, self.parsed, self.count = [], [], 0
        return lines

    def _merged(self) -> list[bytes]:
        """One line; or the lines as they are, where one of them makes no sense."""
        if len(self.lines) < 2:
            return self.lines
        try:
            if self.count == len(self.lines):
                bucket = bucket_of_singles(self.parsed)
            else:
                bucket = together([bucket_of(data) for data in self.parsed])
            return [bucket_line(bucket).encode()]
        except BROKEN:
            return self.lines


def thinned_layers(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Half as many samples: each with its neighbour of the same optimizer."""
    waiting: dict[int, tuple[bytes, dict[str, Any]]] = {}
    for line in lines:
        try:
            data = read_object(line)
            before = waiting.pop(int(data["o"]), None)
        except BROKEN:
            continue
        if before is None:
            waiting[int(data["o"])] = line, data
        else:
            yield from _pair(before, (line, data))
    for line, _ in waiting.values():
        yield line


def _pair(one: tuple[bytes, dict[str, Any]], other: tuple[bytes, dict[str, Any]]) -> list[bytes]:
    try:
        return [object_line(added_layers(one[1], other[1])).encode()]
    except BROKEN:
        return [one[0], other[0]]
