"""Thin the lines of a record as a run gets long, as a stream, so that memory stays constant.

Lines that are not JSON are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ampwise.runs.bucket import merge_buckets
from ampwise.runs.json_lines import (
    LINE_ERRORS,
    bucket_line,
    merge_layers,
    merge_steps,
    object_line,
    parse_bucket,
    read_object,
)

__all__ = ["RecordLimits", "bucket_size", "thin_layers", "thin_steps"]

MOST_AT_ONCE = 256  # lines in memory; a bucket of more lines is merged in several rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """Size limits of a record. With these, the record of 300 tensors stays under 200 MB however long the run is."""

    rows: int = 50_000  # lines of steps.jsonl at which older ones are merged
    samples: int = 512  # lines of layers.jsonl at which neighbours are merged
    layer_bytes: int = 96_000_000  # bytes of layers.jsonl at which they are merged, if there are at least 16
    buffer_bytes: int = 256_000  # buffered in memory

    @property
    def recent_rows(self) -> int:
        """Number of newest steps that are not merged."""
        return self.rows // 4


def bucket_size(old_steps: int, limits: RecordLimits) -> int:
    """Return how many steps to merge into one line, so that older steps take a quarter of the lines.

    It is a power of two, so that buckets double in size, and all older steps have the same density.
    """
    wanted = max(1, limits.rows // 4)
    needed = -(-old_steps // wanted)
    return 1 << (needed - 1).bit_length() if needed > 1 else 1


def thin_steps(lines: Iterable[bytes], *, old: int, size: int) -> Iterator[bytes]:
    """Merge the first ``old`` lines into buckets of up to ``size`` steps, and keep the others."""
    remaining = iter(lines)
    groups: dict[int, _Group] = {}  # by optimizer: those of two networks alternate
    for line in itertools.islice(remaining, old):
        try:
            data = read_object(line)
            count, optimizer = int(data.get("k", 1)), int(data.get("o", 0))
        except LINE_ERRORS:
            continue
        group = groups.setdefault(optimizer, _Group())
        if group.count + count > size:
            yield from group.taken()
        group.add(data, count, line)
    for group in groups.values():
        yield from group.taken()
    yield from remaining


class _Group:
    """Lines to merge into one."""

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
        """Return the merged line, and start over."""
        lines = self._merged()
        self.lines, self.parsed, self.count = [], [], 0
        return lines

    def _merged(self) -> list[bytes]:
        """Merge the lines into one; keep them if one is invalid."""
        if len(self.lines) < 2:
            return self.lines
        try:
            if self.count == len(self.lines):
                bucket = merge_steps(self.parsed)
            else:
                bucket = merge_buckets([parse_bucket(data) for data in self.parsed])
            return [bucket_line(bucket).encode()]
        except LINE_ERRORS:
            return self.lines


def thin_layers(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Halve the number of samples by merging each with its neighbour of the same optimizer."""
    pending: dict[int, tuple[bytes, dict[str, Any]]] = {}
    for line in lines:
        try:
            data = read_object(line)
            before = pending.pop(int(data["o"]), None)
        except LINE_ERRORS:
            continue
        if before is None:
            pending[int(data["o"])] = line, data
        else:
            yield from _pair(before, (line, data))
    for line, _ in pending.values():
        yield line


def _pair(one: tuple[bytes, dict[str, Any]], other: tuple[bytes, dict[str, Any]]) -> list[bytes]:
    try:
        return [object_line(merge_layers(one[1], other[1])).encode()]
    except LINE_ERRORS:
        return [one[0], other[0]]
