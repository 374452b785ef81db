"""Mending until nothing is left to mend: read, check, mend, and again. Nothing is written here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ampwise.finding import Finding
from ampwise.lint.check import Task, check_texts
from ampwise.lint.fix import mend
from ampwise.source.script import Script, Unreadable, read_script, script_from_text

__all__ = ["Repair", "Repairs", "repair"]

MOST_PASSES = 10  # as ruff: mends that never come to rest undo each other


@dataclass(slots=True)
class Repair:
    """One file as it was and as it is to be."""

    before: Script
    text: str
    mended: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class Repairs:
    """The files to change, and what is to be said about those that could not be."""

    files: dict[str, Repair] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many findings are mended."""
        return sum(len(change.mended) for change in self.files.values())


def repair(findings: Iterable[Finding], task: Task, *, unsafe: bool) -> Repairs:
    """What ``findings``, and those that come to light by mending them, make of the files of ``task``."""
    repairs = Repairs()
    texts = dict(task.texts)
    for _ in range(MOST_PASSES):
        changed = _one_pass(findings, texts, repairs, unsafe)
        if not changed:
            return repairs
        texts |= changed
        # Those that a rule came to from another file have no codes of their own.
        codes = {path: task.codes.get(path, frozenset()) for path in changed}
        findings = check_texts(task.but(codes=codes, texts=texts)).findings
    repairs.notes += [
        f"{path}: mended {MOST_PASSES} times without an end; please report it"
        for path in _by_file(finding for finding in findings if finding.edits and (finding.safe or unsafe))
    ]
    return repairs


def _one_pass(findings: Iterable[Finding], texts: Mapping[str, str], repairs: Repairs, unsafe: bool) -> dict[str, str]:
    """Mend each file once; the whole text of those that changed."""
    changed = {}
    for path, found in _by_file(findings).items():
        try:
            script = script_from_text(texts[path], path) if path in texts else read_script(path)
        except Unreadable as error:  # gone since it was checked
            repairs.notes.append(f"{path}: not mended: {error.reason}")
            continue
        mended = mend(script, found, unsafe=unsafe)
        if mended.refused:
            repairs.notes.append(f"{path}: {mended.refused}; please report it")
        if mended.mended:
            change = repairs.files.setdefault(path, Repair(script, script.text))
            change.text = mended.text
            change.mended += mended.mended
            changed[path] = ("\ufeff" if script.bom else "") + script.file_text(mended.text)
    return changed


def _by_file(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    grouped: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.edits and finding.place.file is not None:
            grouped.setdefault(finding.place.file, []).append(finding)
    return grouped
