"""Fix findings in passes of check and fix until no fix is left. Nothing is written here.

A fix is accepted only if a check of the fixed text shows that its finding is gone and there is no new one. So each
pass leaves fewer findings, and the loop ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ampwise.check import linter
from ampwise.check.apply_edits import FixedScript, apply_fixes
from ampwise.check.source.project import Project, SourceFile
from ampwise.check.source.script import SourceScript, UnreadableFile, read_script, script_from_text
from ampwise.check.source_rules import source_rules
from ampwise.finding import Finding

__all__ = ["FileFix", "FileFixes", "fix_findings"]


@dataclass(slots=True)
class FileFix:
    """File before and after its fixes."""

    before: SourceScript
    text: str
    fixed: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class FileFixes:
    """Files to change, and messages about fixes that were not accepted, by file."""

    files: dict[str, FileFix] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of fixed findings."""
        return sum(len(change.fixed) for change in self.files.values())

    @property
    def notes(self) -> list[str]:
        return [note for notes in self.refused.values() for note in notes]


def fix_findings(findings: Iterable[Finding], task: linter.CheckTask, *, unsafe: bool) -> FileFixes:
    """Fix ``findings``, and others that block their fixes, in the files of ``task``."""
    repairs = FileFixes()
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
        # A file with findings from the check of another file may have no codes.
        codes = {path: task.codes.get(path, frozenset()) for path in changed}
        findings = linter.check_texts(task.but(codes=codes, texts=texts)).findings


def _repaired(path: str, findings: list[Finding], task: linter.CheckTask, repairs: FileFixes) -> str | None:
    """Return the whole text of a file with the fixes of ``findings`` that are accepted; None if there are none."""
    try:
        script = script_from_text(task.texts[path], path) if path in task.texts else read_script(path)
    except UnreadableFile as error:  # removed since it was checked
        repairs.refused[path] = [f"{path}: not fixed: {error.reason}"]
        return None
    trial = _Trial(script, task)
    fresh = [finding for finding in findings if finding in trial.before]
    stale = [f"{path}: not fixed: it has changed since it was checked"] if len(fresh) < len(findings) else []
    outcome, refused = trial.accepted(fresh)
    repairs.refused[path] = stale + refused
    if not outcome.result.fixed:
        return None
    change = repairs.files.setdefault(path, FileFix(script, script.text))
    change.text = outcome.result.text
    change.fixed += [finding for finding in fresh if finding in outcome.gone]
    return _whole(script, outcome.result.text)


@dataclass(slots=True)
class _Outcome:
    """Result of some fixes: the script, the findings that are gone, and the reason against it, if any."""

    result: FixedScript
    gone: list[Finding] = field(default_factory=list)
    problem: str | None = None


class _Trial:
    """Trial of fixes: compares the findings in a script, and in the files that import it, before and after fixes."""

    def __init__(self, script: SourceScript, task: linter.CheckTask) -> None:
        self._script, self._task = script, task
        self._texts = {**task.texts, script.path: _whole(script, script.text)}
        project = Project(task.project_paths, self._texts)
        self._paths = [script.path, *project.importers(script.path)]
        # All rules, ignoring suppressions: a new finding counts even if a comment hides it.
        self._checks: list[Callable[[SourceFile], Iterable[Finding]]] = []
        self.before: list[Finding] = []
        for rule in source_rules():
            try:
                self.before += self._found(project, rule.check_source)
            except Exception:  # reported when the file was checked
                continue
            self._checks.append(rule.check_source)

    def accepted(self, findings: Sequence[Finding]) -> tuple[_Outcome, list[str]]:
        """Return the fixes that work together, and a message for each that does not."""
        together = self._outcome(apply_fixes(self._script, findings, unsafe=True))
        if together.problem is None:
            return together, []
        taken, refused = _Outcome(apply_fixes(self._script, (), unsafe=True)), []
        for finding in findings:
            if finding in taken.gone:  # fixed by an earlier fix
                continue
            tried = self._outcome(apply_fixes(self._script, [*taken.result.fixed, finding], unsafe=True))
            if tried.problem is None:
                taken = tried
            else:
                refused.append(f"{finding.place}: {finding.rule.code} not fixed: {tried.problem}")
        return taken, refused

    def _outcome(self, result: FixedScript) -> _Outcome:
        if not result.fixed:
            return _Outcome(result, problem=result.refused)
        project = Project(
            self._task.project_paths, {**self._texts, self._script.path: _whole(self._script, result.text)}
        )
        try:
            after = [finding for check in self._checks for finding in self._found(project, check)]
        except Exception as error:  # a rule that fails proves nothing
            return _Outcome(result, problem=f"the fixed text could not be checked ({type(error).__name__})")
        ranges = [(old, self._range_after(old, result)) for old in self.before]
        new = [(finding, _offset_of(result.script, finding)) for finding in after]
        gone = [old for old, where in ranges if not any(_is_at(finding, at, old, where) for finding, at in new)]
        if any(finding not in gone for finding in result.fixed):
            return _Outcome(result, gone, "the fix would not remove the finding")
        for finding, at in new:
            if not any(_is_at(finding, at, old, where) for old, where in ranges):
                added = f"the fix would cause {finding.rule.code} ({finding.rule.name}): {finding.message}"
                return _Outcome(result, gone, added)
        return _Outcome(result, gone)

    def _found(self, project: Project, check: Callable[[SourceFile], Iterable[Finding]]) -> Iterator[Finding]:
        for path in self._paths:
            try:
                code = project.code(path)
            except UnreadableFile:
                continue
            yield from check(code)

    def _range_after(self, finding: Finding, result: FixedScript) -> tuple[int, int]:
        """Return the first and last offset at which a finding may begin after the edits."""
        first = last = offset = _offset_of(self._script, finding)
        if finding.place.file != self._script.path:
            return first, last
        for edit in {edit for fixed in result.fixed for edit in fixed.edits}:
            start, stop = self._script.offsets(edit)
            if stop < offset or start < stop == offset:
                first += len(edit.content) - (stop - start)
                last += len(edit.content) - (stop - start)
            elif start <= offset:  # inside replaced text, or at an insertion
                first -= offset - start
                last += len(edit.content)
        return first, last


def _offset_of(script: SourceScript, finding: Finding) -> int:
    """Return the offset of a finding; in another file than ``script``, a number from its line and column."""
    place = finding.place
    if place.file != script.path:
        return (place.line or 1) * 10_000 + (place.column or 1)
    return script.offset(place.line or 1, place.column or 1, place.cell)


def _is_at(new: Finding, at: int, old: Finding, where: tuple[int, int]) -> bool:
    is_same = new.rule.code == old.rule.code and new.place.file == old.place.file
    return is_same and where[0] <= at <= where[1]


def _whole(script: SourceScript, text: str) -> str:
    return ("\ufeff" if script.bom else "") + script.file_text(text)


def _by_file(findings: Iterable[Finding], unsafe: bool) -> dict[str, list[Finding]]:
    grouped: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.edits and (finding.safe or unsafe) and finding.place.file is not None:
            grouped.setdefault(finding.place.file, []).append(finding)
    return grouped
