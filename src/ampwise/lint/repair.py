"""Fixing until nothing is left to fix: read, check, fix, and again. Nothing is written here.

A fix is taken only when the text it gives was checked: its finding is gone, and there is no new one. That ends by
itself, as each pass leaves fewer findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ampwise.finding import Finding
from ampwise.lint import check as linter
from ampwise.lint.fix import Mended, mend
from ampwise.source.project import Code, Project
from ampwise.source.script import Script, Unreadable, read_script, script_from_text

__all__ = ["Repair", "Repairs", "repair"]


@dataclass(slots=True)
class Repair:
    """One file as it was and as it is to be."""

    before: Script
    text: str
    mended: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class Repairs:
    """The files to change, and what is to be said about fixes that were not taken, by file."""

    files: dict[str, Repair] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many findings are mended."""
        return sum(len(change.mended) for change in self.files.values())

    @property
    def notes(self) -> list[str]:
        return [note for notes in self.refused.values() for note in notes]


def repair(findings: Iterable[Finding], task: linter.Task, *, unsafe: bool) -> Repairs:
    """What ``findings``, and those that were in their way, make of the files of ``task``."""
    repairs = Repairs()
    texts = dict(task.texts)
    while True:
        changed: dict[str, str] = {}
        for path, found in _by_file(findings, unsafe).items():
            text = _repaired(path, found, task.but(texts=texts | changed), repairs)
            if text is not None:
                changed[path] = text
        if not changed:
            return repairs
        texts |= changed
        # Those that a rule came to from another file have no codes of their own.
        codes = {path: task.codes.get(path, frozenset()) for path in changed}
        findings = linter.check_texts(task.but(codes=codes, texts=texts)).findings


def _repaired(path: str, findings: list[Finding], task: linter.Task, repairs: Repairs) -> str | None:
    """The whole text of a file with the fixes of ``findings`` that hold; None when there are none."""
    try:
        script = script_from_text(task.texts[path], path) if path in task.texts else read_script(path)
    except Unreadable as error:  # gone since it was checked
        repairs.refused[path] = [f"{path}: not fixed: {error.reason}"]
        return None
    trial = _Trial(script, task)
    fresh = [finding for finding in findings if finding in trial.before]
    stale = [f"{path}: not fixed: it has changed since it was checked"] if len(fresh) < len(findings) else []
    outcome, refused = trial.proven(fresh)
    repairs.refused[path] = stale + refused
    if not outcome.mended.mended:
        return None
    change = repairs.files.setdefault(path, Repair(script, script.text))
    change.text = outcome.mended.text
    change.mended += [finding for finding in fresh if finding in outcome.gone]
    return _whole(script, outcome.mended.text)


@dataclass(slots=True)
class _Outcome:
    """What came of making some fixes: the script, which findings are gone, and what speaks against it."""

    mended: Mended
    gone: list[Finding] = field(default_factory=list)
    trouble: str | None = None


class _Trial:
    """A script, what rules find in it and in the files that import it, and what they find after fixes."""

    def __init__(self, script: Script, task: linter.Task) -> None:
        self._script, self._task = script, task
        self._texts = {**task.texts, script.path: _whole(script, script.text)}
        project = Project(task.project_paths, self._texts)
        self._paths = [script.path, *project.importers(script.path)]
        # All rules, and suppressed or not: a fix is no better for a comment that hides what it does.
        self._checks: list[Callable[[Code], Iterable[Finding]]] = []
        self.before: list[Finding] = []
        for rule in linter.source_rules():
            try:
                self.before += self._found(project, rule.module.check)
            except Exception:  # it was reported when the file was checked
                continue
            self._checks.append(rule.module.check)

    def proven(self, findings: Sequence[Finding]) -> tuple[_Outcome, list[str]]:
        """The fixes that hold together, and a line for each that does not."""
        together = self._outcome(mend(self._script, findings, unsafe=True))
        if together.trouble is None:
            return together, []
        taken, refused = _Outcome(mend(self._script, (), unsafe=True)), []
        for finding in findings:
            if finding in taken.gone:  # with one that was taken before
                continue
            tried = self._outcome(mend(self._script, [*taken.mended.mended, finding], unsafe=True))
            if tried.trouble is None:
                taken = tried
            else:
                refused.append(f"{finding.place}: {finding.rule.code} not fixed: {tried.trouble}")
        return taken, refused

    def _outcome(self, mended: Mended) -> _Outcome:
        if not mended.mended:
            return _Outcome(mended, trouble=mended.refused)
        project = Project(
            self._task.project_paths, {**self._texts, self._script.path: _whole(self._script, mended.text)}
        )
        try:
            after = [finding for check in self._checks for finding in self._found(project, check)]
        except Exception as error:  # a rule that fails proves nothing
            return _Outcome(mended, trouble=f"what it gives could not be checked ({type(error).__name__})")
        spots = [(old, self._spot(old, mended)) for old in self.before]
        new = [(finding, _spot_in(mended.script, finding)) for finding in after]
        gone = [old for old, spot in spots if not any(_is_at(finding, at, old, spot) for finding, at in new)]
        if any(finding not in gone for finding in mended.mended):
            return _Outcome(mended, gone, "it would still be found")
        for finding, at in new:
            if not any(_is_at(finding, at, old, spot) for old, spot in spots):
                told = f"it would bring {finding.rule.code} ({finding.rule.name}): {finding.message}"
                return _Outcome(mended, gone, told)
        return _Outcome(mended, gone)

    def _found(self, project: Project, check: Callable[[Code], Iterable[Finding]]) -> Iterator[Finding]:
        for path in self._paths:
            try:
                code = project.code(path)
            except Unreadable:
                continue
            yield from check(code)

    def _spot(self, finding: Finding, mended: Mended) -> tuple[int, int]:
        """The first and last position where the text of a finding may begin after the edits."""
        first = last = offset = _spot_in(self._script, finding)
        if finding.place.file != self._script.path:
            return first, last
        for edit in {edit for made in mended.mended for edit in made.edits}:
            start, stop = self._script.offsets(edit)
            if stop < offset or start < stop == offset:
                first += len(edit.content) - (stop - start)
                last += len(edit.content) - (stop - start)
            elif start <= offset:  # in what is replaced, or where something is inserted
                first -= offset - start
                last += len(edit.content)
        return first, last


def _spot_in(script: Script, finding: Finding) -> int:
    """Where a finding begins; in another file than ``script``, by its line."""
    place = finding.place
    if place.file != script.path:
        return (place.line or 1) * 10_000 + (place.column or 1)
    return script.offset(place.line or 1, place.column or 1, place.cell)


def _is_at(new: Finding, at: int, old: Finding, spot: tuple[int, int]) -> bool:
    is_same = new.rule.code == old.rule.code and new.place.file == old.place.file
    return is_same and spot[0] <= at <= spot[1]


def _whole(script: Script, text: str) -> str:
    return ("\ufeff" if script.bom else "") + script.file_text(text)


def _by_file(findings: Iterable[Finding], unsafe: bool) -> dict[str, list[Finding]]:
    grouped: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.edits and (finding.safe or unsafe) and finding.place.file is not None:
            grouped.setdefault(finding.place.file, []).append(finding)
    return grouped
