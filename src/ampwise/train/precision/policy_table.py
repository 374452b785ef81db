"""Table of which module runs in which precision; numbered modules that are alike share a line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["ModuleLine", "brace_ranges", "policy_table"]

HEADINGS = ("module", "class", "params", "", "runs in", "why")
NUMBERS = frozenset({2})  # columns set to the right
ANY = "#"  # placeholder for a number in module names; not a valid attribute name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLine:
    """A line of the table: a module, or several that are alike."""

    path: tuple[str, ...]  # the name, split at its dots
    kind: str
    parameters: int
    precision: str
    why: str
    inside: int = 0  # how many parts of the path name the module whose rule applies; 0: its own rule, or none
    times: int = 1

    def cells(self) -> tuple[str, ...]:
        above = ".".join(self.path[: self.inside])
        return (
            ".".join(self.path) or "(the model itself)",
            self.kind,
            _human(self.parameters) if self.parameters else "-",
            f"×{self.times}" if self.times > 1 else "",
            self.precision,
            f"inside {above}" if above else self.why,
        )


def policy_table(base: str, parameters: Counter[str], lines: Sequence[ModuleLine]) -> str:
    """Return the whole text: parameter counts by precision, then the modules."""
    counts = ", ".join(f"{_human(count)} in {precision}" for precision, count in parameters.most_common() if count)
    rows = [HEADINGS, *(line.cells() for line in _collapsed(lines))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [f"{base} base; parameters: {counts or 'none'}"]
    for row in rows:
        cells = (
            cell.rjust(width) if place in NUMBERS else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        )
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _collapsed(lines: Iterable[ModuleLine]) -> Iterator[ModuleLine]:
    """Merge lines that differ only in numbers in the name, where every combination of the numbers occurs."""
    alike: dict[ModuleLine, list[tuple[str, ...]]] = {}
    for line in lines:
        pattern = replace(line, path=tuple(ANY if part.isdecimal() else part for part in line.path))
        alike.setdefault(pattern, []).append(tuple(part for part in line.path if part.isdecimal()))
    for line, all_numbers in alike.items():
        for block in _blocks(all_numbers):
            columns = (sorted({int(number) for number in column}) for column in zip(*block, strict=True))
            numbers = iter([brace_ranges(column) for column in columns])
            path = tuple(next(numbers) if part == ANY else part for part in line.path)
            yield replace(line, path=path, times=len(block))


def _blocks(rows: list[tuple[str, ...]], place: int = 0) -> Iterator[list[tuple[str, ...]]]:
    """Split rows of numbers, from the left, until each block has every combination of its columns' values."""
    if math.prod(len(set(column)) for column in zip(*rows, strict=True)) == len(rows):
        yield rows
        return
    split: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        split.setdefault(row[place], []).append(row)
    for block in split.values():
        yield from _blocks(block, place + 1)


def brace_ranges(numbers: list[int]) -> str:
    """Format numbers in the style of shell brace expansion.

    >>> brace_ranges([3]), brace_ranges([0, 1, 2, 3]), brace_ranges([0, 1, 2, 5, 7, 8])
    ('3', '{0..3}', '{0..2,5,7,8}')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = (f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    return "{" + ",".join(shown) + "}"


def _human(count: float) -> str:
    """Format a count with a unit.

    >>> _human(12), _human(4096), _human(999_999), _human(7_241_732_096)
    ('12', '4.1 k', '1.0 M', '7.2 B')
    """
    if count < 1000:
        return str(count)
    for unit in ("k", "M", "B"):
        count /= 1000
        if round(count, 1) < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} T"
