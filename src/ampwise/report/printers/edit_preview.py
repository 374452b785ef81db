"""Show what the edits of a finding would change: removed and added lines, as ruff shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampwise.finding import Edit, Finding, edited
from ampwise.finding.terminal import paint
from ampwise.report.source_lines import SourceFiles, line_start

__all__ = ["preview_edits"]

CONTEXT = 1  # lines before and after a change
FAR_APART = 3  # changes with fewer unchanged lines between them are shown as one


class LineChange:
    """Lines that are replaced by others.

    ``line`` is the number of the first, in ``cell`` for a notebook, and ``shift`` is by how many lines the changes
    above move it.
    """

    def __init__(self, cell: int | None, line: int, old: list[str], new: list[str], shift: int) -> None:
        # Unchanged lines at the start and the end are left out.
        while old and new and old[0] == new[0]:
            line, old, new = line + 1, old[1:], new[1:]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        self.cell, self.line, self.old, self.new, self.shift = cell, line, old, new, shift


def preview_edits(finding: Finding, sources: SourceFiles, colour: bool = False) -> list[str]:
    """Return the lines to print for a finding's edits; none if it has no edits, or the file has changed."""
    file = finding.place.file
    if not finding.edits or file is None:
        return []
    try:
        changes = list(_changes(finding.edits, file, sources))
    except ValueError:  # the file has changed
        return []
    output = [] if finding.safe else [f"{paint('note', 'help', colour)}: applied only with `--unsafe-fixes`"]
    width = max(len(str(change.line + change.shift + len(change.new) + CONTEXT - 1)) for change in changes)
    bar = paint(f"{'':{width}} |", "gutter", colour)
    for number, change in enumerate(changes):
        if number and changes[number - 1].cell == change.cell:
            output[-1] = paint("...", "gutter", colour)
        else:
            heading = (
                [] if change.cell is None else [f"{'':{width}}{paint(':::', 'gutter', colour)} cell {change.cell}"]
            )
            output += [*heading, bar]
        output += [*_rows(change, sources.lines(file, change.cell), width, colour), bar]
    return output


def _rows(change: LineChange, lines: Sequence[str], width: int, colour: bool) -> Iterator[str]:
    """Yield a change and the lines around it, numbered as after the change; removed lines have no number."""
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
        code, shown = line_start(line), "" if mark == "-" else str(number)
        if mark == "|":
            yield f"{paint(f'{shown:>{width}} |', 'gutter', colour)} {code}".rstrip()
        else:
            changed = paint(f"{mark} {code}".rstrip(), "removed" if mark == "-" else "added", colour)
            yield f"{paint(f'{shown:>{width}}', 'gutter', colour)} {changed}"
        number += mark != "-"


def _changes(edits: Sequence[Edit], file: str, sources: SourceFiles) -> Iterator[LineChange]:
    """Yield the edits as changes of whole lines, top down; ValueError if the text has no such lines."""
    groups: list[list[Edit]] = []  # edits that are near each other
    for edit in sorted(edits, key=lambda edit: (edit.cell or 0, edit.start, edit.end)):
        near = groups and groups[-1][0].cell == edit.cell
        if near and edit.line - max(other.end_line for other in groups[-1]) < FAR_APART:
            groups[-1].append(edit)
        else:
            groups.append([edit])
    previous: LineChange | None = None
    for group in groups:
        cell, first, last = group[0].cell, group[0].line, max(edit.end_line for edit in group)
        known = sources.lines(file, cell)
        if not known or last > len(known) + 1:
            raise ValueError(f"there is no line {last}")
        # One line more: a text that ends in a newline has a position after it.
        lines = [*known, ""][first - 1 : last]
        inner = [edit.but(line=edit.line - first + 1, end_line=edit.end_line - first + 1) for edit in group]
        is_below = previous is not None and previous.cell == cell
        shift = previous.shift + len(previous.new) - len(previous.old) if previous and is_below else 0
        previous = LineChange(cell, first, lines, edited("\n".join(lines), inner).split("\n"), shift)
        yield previous
