"""What the edits of a finding would change: the lines taken away and added, as ruff shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampwise.finding import Edit, Finding, edited
from ampwise.frozen import Frozen
from ampwise.printers.excerpt import Sources, start_of
from ampwise.printers.terminal import paint

__all__ = ["patch"]

CONTEXT = 1  # lines before and after a change
FAR_APART = 3  # changes with fewer unchanged lines between them are shown as one


class Change(Frozen):
    """Lines that give way to others.

    ``line`` is the number of the first, in ``cell`` where there are cells, and ``shift`` is by how many lines the
    changes above it move it.
    """

    __slots__ = ("cell", "line", "old", "new", "shift")  # noqa: RUF023 (the order they are shown in)

    def __init__(self, cell: int | None, line: int, old: list[str], new: list[str], shift: int = 0) -> None:
        self.cell, self.line, self.old, self.new, self.shift = cell, line, old, new, shift


def patch(finding: Finding, sources: Sources, colour: bool = False) -> list[str]:
    """The lines to print for a finding's edits; none when it has none, or the text is not the one they are for."""
    if not finding.edits or finding.place.file is None:
        return []
    try:
        changes = list(_changes(finding.edits, finding.place.file, sources))
    except ValueError:  # the file has changed since
        return []
    note = [] if finding.safe else [f"{paint('note', 'help', colour)}: made only with `--unsafe-fixes`"]
    width = max(len(str(change.line + change.shift + len(change.new) + CONTEXT - 1)) for change in changes)
    bar = paint(f"{'':{width}} |", "gutter", colour)
    output: list[str] = []
    for previous, change in zip([None, *changes], changes, strict=False):
        if previous is not None and previous.cell == change.cell:
            output[-1] = paint("...", "gutter", colour)
        else:
            output += [*_cell_heading(change.cell, width, colour), bar]
        output += [*_rows(change, sources.lines(finding.place.file, change.cell), width, colour), bar]
    return note + output


def _cell_heading(cell: int | None, width: int, colour: bool) -> list[str]:
    return [] if cell is None else [f"{'':{width}}{paint(':::', 'gutter', colour)} cell {cell}"]


def _rows(change: Change, lines: Sequence[str], width: int, colour: bool) -> Iterator[str]:
    """A change and the lines around it, with the numbers they have afterwards; those taken away have none."""
    after = change.line - 1 + len(change.old)
    before = lines[max(0, change.line - 1 - CONTEXT) : change.line - 1]
    rows = [
        *(("|", line) for line in before),
        *(("-", line) for line in change.old),
        *(("+", line) for line in change.new),
        *(("|", line) for line in lines[after : after + CONTEXT]),
    ]
    number = change.line - len(before) + change.shift
    for mark, line in rows:
        yield _row("" if mark == "-" else str(number), width, mark, start_of(line), colour)
        number += mark != "-"


def _row(number: str, width: int, mark: str, code: str, colour: bool) -> str:
    if mark == "|":
        return f"{paint(f'{number:>{width}} |', 'gutter', colour)} {code}".rstrip()
    style = "removed" if mark == "-" else "added"
    return f"{paint(f'{number:>{width}}', 'gutter', colour)} {paint(f'{mark} {code}'.rstrip(), style, colour)}"


def _changes(edits: Sequence[Edit], file: str, sources: Sources) -> Iterator[Change]:
    """The edits as changes of whole lines, top down; ValueError when the text has no such lines."""
    previous: Change | None = None
    for group in _groups(edits):
        cell, first, last = group[0].cell, group[0].line, max(edit.end_line for edit in group)
        known = sources.lines(file, cell)
        if not known or last > len(known) + 1:
            raise ValueError(f"there is no line {last}")
        # One more than there are: a text that ends in a newline has an end after it.
        lines = [*known, ""][first - 1 : last]
        inner = [edit.but(line=edit.line - first + 1, end_line=edit.end_line - first + 1) for edit in group]
        is_below = previous is not None and previous.cell == cell
        shift = previous.shift + len(previous.new) - len(previous.old) if previous and is_below else 0
        previous = _trimmed(Change(cell, first, lines, edited("\n".join(lines), inner).split("\n"), shift))
        yield previous


def _groups(edits: Sequence[Edit]) -> list[list[Edit]]:
    """Edits that are near each other, top down."""
    groups: list[list[Edit]] = []
    for edit in sorted(edits, key=lambda edit: (edit.cell or 0, edit.start, edit.end)):
        near = groups and groups[-1][0].cell == edit.cell
        if near and edit.line - max(other.end_line for other in groups[-1]) < FAR_APART:
            groups[-1].append(edit)
        else:
            groups.append([edit])
    return groups


def _trimmed(change: Change) -> Change:
    """Without the lines that are the same before and after at either end."""
    shorter = min(len(change.old), len(change.new))
    pairs = list(zip(change.old, change.new, strict=False))
    top = next((number for number, (old, new) in enumerate(pairs) if old != new), shorter)
    old, new = change.old[top:], change.new[top:]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return change.but(line=change.line + top, old=old, new=new)
