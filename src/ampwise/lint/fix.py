"""Mending: the edits of findings, made in the text of the script they were found in.

Nothing is written here. A pass makes what can be made at once; what is in the way of something else is left for
the next pass, which looks at the new text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ampwise.finding import Edit, Finding, Place, edited
from ampwise.source.script import Script, Unreadable, script_from_bytes

__all__ = ["Mended", "mend", "unified_diff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A script after one pass: what it is now, which findings that mended, and which it left, in file order."""

    script: Script
    mended: tuple[Finding, ...]
    left: tuple[Finding, ...]
    refused: str | None = None  # why nothing was changed though there were edits to make

    @property
    def text(self) -> str:
        """The code as it is now; ``script.file_text`` makes a whole file of it."""
        return self.script.text


def mend(script: Script, findings: Iterable[Finding], *, unsafe: bool) -> Mended:
    """Make the edits of this script's findings that do not get in each other's way, all of a finding's or none.

    Edits that are not safe are made only with ``unsafe``. When the result is not the code it should be, as after a
    rule's mistake, the script stays as it was and ``refused`` says why.
    """
    ordered = sorted(findings, key=_position)
    chosen, made = _choose([finding for finding in ordered if finding.edits and (finding.safe or unsafe)])
    # By identity: two findings may be equal.
    taken = {id(finding) for finding in chosen}
    left = tuple(finding for finding in ordered if id(finding) not in taken)
    if not chosen:
        return Mended(script=script, mended=(), left=left)
    try:
        after = _after(script, made)
    except (Unreadable, ValueError) as error:
        reason = error.reason if isinstance(error, Unreadable) else str(error)
        codes = ", ".join(sorted({finding.rule.code for finding in chosen}))
        refused = f"mending {codes} would have spoiled the file, so nothing was changed: {reason}"
        return Mended(script=script, mended=(), left=tuple(ordered), refused=refused)
    return Mended(script=after, mended=tuple(chosen), left=left)


def unified_diff(script: Script, text: str) -> str:
    """What changes when ``text`` takes the place of a script's code, as ruff shows it: cell by cell in a notebook.

    Empty when nothing changes.
    """
    if text == script.text:
        return ""
    if not script.cells:
        name = _quoted(script.path, script.encoding)
        # After a blank, patch expects a date; after a tab, it knows that there is none.
        return _diff(f"{name}\t" if " " in name else name, *_as_in_file(script, text))
    before, after = _cell_texts(script), _cell_texts(_read_again(script, text))
    return "".join(
        _diff(_quoted(f"{script.path}:cell {number}", script.encoding), code, after.get(number, ""))
        for number, code in before.items()
        if code != after.get(number, "")
    )


def _choose(findings: Sequence[Finding]) -> tuple[list[Finding], list[Edit]]:
    """The findings that can be mended together, first come first served, and the edits that takes."""
    chosen: list[Finding] = []
    made: list[Edit] = []
    for finding in findings:
        new = [edit for edit in finding.edits if edit not in made]
        shared = [edit for edit in finding.edits if edit in made]
        # A line two findings ask for, such as an import, serves both; so does one and the same change. But a
        # bracket that closes one's parenthesis cannot close the other's too.
        is_shareable = not new or all(_is_of_whole_lines(edit) or not edit.is_insertion for edit in shared)
        if is_shareable and not any(_collide(one, other) for one in new for other in made):
            chosen.append(finding)
            made += new
    return chosen, made


def _collide(one: Edit, other: Edit) -> bool:
    """Whether two findings' edits cannot be made in one pass."""
    if one.is_insertion and other.is_insertion and (one.cell, one.start) == (other.cell, other.start):
        # Lines follow each other; which of two fragments comes first is a question of meaning.
        return not (_is_of_whole_lines(one) and _is_of_whole_lines(other))
    return one.overlaps(other)


def _is_of_whole_lines(edit: Edit) -> bool:
    return edit.content.startswith("\n") or edit.content.rstrip(" \t").endswith("\n")


def _after(script: Script, edits: Iterable[Edit]) -> Script:
    """The script as it would be read from disk after the edits; Unreadable or ValueError when it would be spoiled."""
    text = edited(script.text, [_in_text(script, edit) for edit in edits])
    after = _read_again(script, text)
    if after.text != text:
        raise ValueError("what would be written is not what would be read")
    return after


def _in_text(script: Script, edit: Edit) -> Edit:
    """An edit of a cell as one of the script's whole text."""
    if edit.cell is None:
        return edit
    above = script.line_of(Place(file=script.path, cell=edit.cell, line=1)) - 1
    return edit.but(line=edit.line + above, end_line=edit.end_line + above, cell=None)


def _read_again(script: Script, text: str) -> Script:
    return script_from_bytes(script.file_bytes(script.file_text(text)), script.path)


def _position(finding: Finding) -> tuple[object, ...]:
    first = min(((edit.cell or 0, edit.start, edit.end) for edit in finding.edits), default=None)
    place = finding.place
    return first or (place.cell or 0, (place.line or 0, place.column or 0), (place.line or 0, place.column or 0))


def _cell_texts(script: Script) -> dict[int, str]:
    """The code of each cell, ended by a newline: that a cell's last line has none means nothing."""
    return {
        cell.number: "".join(f"{line}\n" for line in script.lines[cell.first_line - 1 :][: cell.lines])
        for cell in script.cells
    }


def _as_in_file(script: Script, text: str) -> tuple[str, str]:
    """The code before and after as ``patch`` must see it: with the mark and the line endings of the file."""
    mark = "\ufeff" if script.bom else ""
    return mark + script.file_text(script.text), mark + script.file_text(text)


def _diff(name: str, before: str, after: str) -> str:
    import difflib

    lines = difflib.unified_diff(_lines(before), _lines(after), name, name)
    return "".join(_with_end(lines))


def _quoted(name: str, encoding: str) -> str:
    r"""A name as ``patch`` and git read it: in quotes, with its bytes as escapes, where it could be taken for more.

    >>> print(_quoted("train.py", "utf-8"), _quoted("a\n+++ b.py", "utf-8"))
    train.py "a\012+++ b.py"
    """
    fits = name.isascii() or encoding == "utf-8"  # the script's own, in which all of its diff is written
    if name.isprintable() and fits and not {'"', "\\"} & set(name):
        return name
    escaped = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in os.fsencode(name))
    return f'"{"".join(escaped)}"'


def _lines(text: str) -> list[str]:
    # Not splitlines, which would also split at a form feed.
    lines = [f"{line}\n" for line in text.split("\n")]
    return [*lines[:-1], lines[-1][:-1]] if lines[-1] != "\n" else lines[:-1]


def _with_end(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
