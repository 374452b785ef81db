"""Apply the edits of findings to the text of a script. Nothing is written here.

One pass applies all edits that do not conflict; the others are left for the next pass, which checks the new text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampwise.check.source.script import SourceScript, UnreadableFile, script_from_bytes
from ampwise.finding import Edit, Finding, Place, edited


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedScript:
    """Script after one pass, with the findings that were fixed and those that were left, in file order."""

    script: SourceScript
    fixed: tuple[Finding, ...]
    left: tuple[Finding, ...]
    refused: str | None = None  # why nothing was changed although there were edits

    @property
    def text(self) -> str:
        """Fixed code; ``script.file_text`` makes a whole file of it."""
        return self.script.text


def apply_fixes(script: SourceScript, findings: Iterable[Finding], *, unsafe: bool) -> FixedScript:
    """Apply the edits of a script's findings that do not conflict; of each finding, all edits or none.

    Unsafe edits are applied only with ``unsafe``. If the result is invalid, because of a bug in a rule, the script
    stays unchanged and ``refused`` has the reason.
    """
    ordered = sorted(findings, key=_position)
    chosen, made = _choose([finding for finding in ordered if finding.edits and (finding.safe or unsafe)])
    # By identity: two findings may be equal.
    taken = {id(finding) for finding in chosen}
    left = tuple(finding for finding in ordered if id(finding) not in taken)
    if not chosen:
        return FixedScript(script=script, fixed=(), left=left)
    try:
        edits = []
        for edit in made:  # of a cell: as one of the whole text
            above = script.line_of(Place(file=script.path, cell=edit.cell, line=1)) - 1 if edit.cell else 0
            edits.append(Edit(edit.line + above, edit.column, edit.end_line + above, edit.end_column, edit.content))
        text = edited(script.text, edits)
        after = _read_again(script, text)
        if after.text != text:
            raise ValueError("the written file would be read back differently")
    except (UnreadableFile, ValueError) as error:
        reason = error.reason if isinstance(error, UnreadableFile) else str(error)
        codes = ", ".join(sorted({finding.rule.code for finding in chosen}))
        refused = f"fixing {codes} would break the file, so nothing was changed: {reason}"
        return FixedScript(script=script, fixed=(), left=tuple(ordered), refused=refused)
    return FixedScript(script=after, fixed=tuple(chosen), left=left)


def unified_diff(script: SourceScript, text: str) -> str:
    """Return the diff between a script's code and ``text``, cell by cell in a notebook, as ruff shows it.

    It is empty if nothing changes.
    """
    if text == script.text:
        return ""
    if not script.cells:
        name = _quoted(script.path, script.encoding)
        # As `patch` needs it: with the byte order mark and line endings of the file. It takes text after a blank for
        # a date; the tab marks the end of the name.
        mark = "\ufeff" if script.bom else ""
        before, after = mark + script.file_text(script.text), mark + script.file_text(text)
        return _diff(f"{name}\t" if " " in name else name, before, after)
    old, new = _cell_texts(script), _cell_texts(_read_again(script, text))
    changed = [(number, code, new.get(number, "")) for number, code in old.items() if code != new.get(number, "")]
    return "".join(
        [_diff(_quoted(f"{script.path}:cell {number}", script.encoding), *codes) for number, *codes in changed]
    )


def _choose(findings: Sequence[Finding]) -> tuple[list[Finding], list[Edit]]:
    """Return the findings that can be fixed together, the first ones first, and their edits."""
    chosen: list[Finding] = []
    made: list[Edit] = []
    for finding in findings:
        new = [edit for edit in finding.edits if edit not in made]
        shared = [edit for edit in finding.edits if edit in made]
        # Two findings may share a whole line, such as an import, or the same replacement. But an inserted bracket
        # that closes one finding's parenthesis cannot close the other's, too.
        is_shareable = not new or all(_is_of_whole_lines(edit) or not edit.is_insertion for edit in shared)
        if is_shareable and not any(_collide(one, other) for one in new for other in made):
            chosen.append(finding)
            made += new
    return chosen, made


def _collide(one: Edit, other: Edit) -> bool:
    """Whether the edits of two findings cannot be applied in one pass."""
    if one.is_insertion and other.is_insertion and (one.cell, one.start) == (other.cell, other.start):
        # Whole lines can follow each other in any order; for two fragments the order matters.
        return not (_is_of_whole_lines(one) and _is_of_whole_lines(other))
    return one.overlaps(other)


def _is_of_whole_lines(edit: Edit) -> bool:
    return edit.content.startswith("\n") or edit.content.rstrip(" \t").endswith("\n")


def _read_again(script: SourceScript, text: str) -> SourceScript:
    return script_from_bytes(script.file_bytes(script.file_text(text)), script.path)


def _position(finding: Finding) -> tuple[object, ...]:
    first = min(((edit.cell or 0, edit.start, edit.end) for edit in finding.edits), default=None)
    place = finding.place
    here = (place.line or 0, place.column or 0)
    return first or (place.cell or 0, here, here)


def _cell_texts(script: SourceScript) -> dict[int, str]:
    """Return the code of each cell, with a newline at its end, which is not significant in a cell."""
    return {
        cell.number: "".join([f"{line}\n" for line in script.lines[cell.first_line - 1 :][: cell.lines]])
        for cell in script.cells
    }


def _diff(name: str, before: str, after: str) -> str:
    import difflib

    # Not splitlines, which also splits at a form feed.
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))
    lines = difflib.unified_diff(old, new, name, name)
    return "".join([line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines])


def _quoted(name: str, encoding: str) -> str:
    r"""Return a file name for a diff, quoted with escapes as ``patch`` and git read it if it has special characters.

    >>> print(_quoted("train.py", "utf-8"), _quoted("a\n+++ b.py", "utf-8"))
    train.py "a\012+++ b.py"
    """
    fits = name.isascii() or encoding == "utf-8"  # the diff is written in the script's encoding
    if name.isprintable() and fits and not {'"', "\\"} & set(name):
        return name
    escaped = [chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in os.fsencode(name)]
    return f'"{"".join(escaped)}"'
