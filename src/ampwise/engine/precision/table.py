"""What runs in which precision, as text: a line for each module, and one line for modules alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Line", "span", "table"]

HEADINGS = ("module", "class", "params", "", "runs in", "why")
NUMBERS = frozenset({2})  # columns set to the right
ANY = "#"  # stands for a number in the names of modules alike; no attribute can be called so


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A module, or several alike."""

    path: tuple[str, ...]  # the name, by its dots
    kind: str
    parameters: int
    precision: str
    why: str
    inside: int = 0  # how many parts of the path are that of the module whose rule it is; 0: its own, or none
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


def table(base: str, parameters: Counter[str], lines: Sequence[Line]) -> str:
    """The whole text: how many parameters run how, then the modules."""
    counts = ", ".join(f"{_human(count)} in {precision}" for precision, count in parameters.most_common() if count)
    rows = [HEADINGS, *(line.cells() for line in _collapsed(lines))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join([f"{base} base; parameters: {counts or 'none'}", *(_aligned(row, widths) for row in rows)])


def _aligned(row: Iterable[str], widths: Sequence[int]) -> str:
    cells = (
        cell.rjust(width) if place in NUMBERS else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        if width
    )
    return "  ".join(cells).rstrip()


def _collapsed(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines that differ only by numbers in the name, as one where the numbers are all there."""
    alike: dict[Line, list[tuple[str, ...]]] = {}
    for line in lines:
        numbers = tuple(part for part in line.path if part.isdecimal())
        path = tuple(ANY if part.isdecimal() else part for part in line.path)
        alike.setdefault(replace(line, path=path), []).append(numbers)
    for line, all_numbers in alike.items():
        for block in _blocks(all_numbers):
            yield _merged(line, block)


def _blocks(rows: list[tuple[str, ...]], place: int = 0) -> Iterator[list[tuple[str, ...]]]:
    """Rows of numbers split, from the left on, until each block has every combination of what is in its columns."""
    combinations = 1
    for column in zip(*rows, strict=True):
        combinations *= len(set(column))
    if combinations == len(rows):
        yield rows
        return
    split: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        split.setdefault(row[place], []).append(row)
    for block in split.values():
        yield from _blocks(block, place + 1)


def _merged(line: Line, block: list[tuple[str, ...]]) -> Line:
    numbers = iter([span(sorted({int(number) for number in column})) for column in zip(*block, strict=True)])
    path = tuple(next(numbers) if part == ANY else part for part in line.path)
    return replace(line, path=path, times=len(block))


def span(numbers: list[int]) -> str:
    """Numbers as a shell would have them.

    >>> span([3]), span([0, 1, 2, 3]), span([0, 1, 2, 5, 7, 8])
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
    """A number that can be read at a glance.

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
