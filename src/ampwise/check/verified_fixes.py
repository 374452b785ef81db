"""Fix findings in passes of check and fix until no fix is left. Nothing is written here.

A fix is accepted only if a check of the fixed text shows that its finding is gone and there is no new one. So each
pass leaves fewer findings, and the loop ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

from ampwise.check import linter
from ampwise.check.apply_edits import FixedScript, apply_fixes
from ampwise.check.source.project import Project
from ampwise.check.source.script import SourceScript, UnreadableFile, read_script, script_from_text
from ampwise.finding import Finding, registry


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
    project = Project(task.project_paths, texts)
    while True:
        by_file: dict[str, list[Finding]] = {}
        for finding in findings:
            if finding.edits and (finding.safe or unsafe) and finding.place.file is not None:
                by_file.setdefault(finding.place.file, []).append(finding)
        changed = []
        for path, found in by_file.items():
            text = _repaired(path, found, project, repairs)
            if text is not None:
                texts[path] = text
                project = project.with_text(path, text)
                changed.append(path)
        if not changed:
            return repairs
        # A file with findings from the check of another file may have no codes.
        codes = {path: task.codes.get(path, frozenset()) for path in changed}
        findings = linter.check_texts(replace(task, codes=codes, texts=texts)).findings


def _repaired(path: str, findings: list[Finding], project: Project, repairs: FileFixes) -> str | None:
    """Return the whole text of a file with the fixes of ``findings`` that are accepted; None if there are none."""
    try:
        script = script_from_text(project.texts[path], path) if path in project.texts else read_script(path)
    except UnreadableFile as error:  # removed since it was checked
        repairs.refused[path] = [f"{path}: not fixed: {error.reason}"]
        return None
    trial = _Trial(script, project)
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


def _whole(script: SourceScript, text: str) -> str:
    return ("\ufeff" if script.bom else "") + script.file_text(text)


@dataclass(slots=True)
class _Outcome:
    """Result of some fixes: the script, the findings that are gone, and the reason against it, if any."""

    result: FixedScript
    gone: list[Finding] = field(default_factory=list)
    problem: str | None = None


class _Trial:
    """Trial of fixes: compares the findings in a script, and in the files that import it, before and after fixes."""

    def __init__(self, script: SourceScript, project: Project) -> None:
        self._script, self._project = script, project.with_text(script.path, _whole(script, script.text))
        self._paths = [script.path, *self._project.importers(script.path)]
        # All rules, ignoring suppressions: a new finding counts even if a comment hides it.
        self._rules: list[ModuleType] = []
        self.before: list[Finding] = []
        for rule in registry.source_rules():
            try:
                self.before += self._found(self._project, rule)
            except Exception:  # reported when the file was checked
                continue
            self._rules.append(rule)

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

    def _found(self, project: Project, rule: ModuleType) -> Iterator[Finding]:
        for path in self._paths:
            try:
                code = project.code(path)
            except UnreadableFile:
                continue
            yield from rule.check_source(code)

    def _outcome(self, result: FixedScript) -> _Outcome:
        if not result.fixed:
            return _Outcome(result, problem=result.refused)
        project = self._project.with_text(self._script.path, _whole(self._script, result.text))
        try:
            after = [finding for rule in self._rules for finding in self._found(project, rule)]
        except Exception as error:  # a rule that fails proves nothing
            return _Outcome(result, problem=f"the fixed text could not be checked ({type(error).__name__})")
        offsets = [_offset_of(result.script, finding) for finding in after]
        gone, known = [], set()
        for old in self.before:
            first, last = self._range_after(old, result)
            same = [
                index
                for index, new in enumerate(after)
                if new.rule.code == old.rule.code
                and new.place.file == old.place.file
                and first <= offsets[index] <= last
            ]
            known.update(same)
            if not same:
                gone.append(old)
        if any(finding not in gone for finding in result.fixed):
            return _Outcome(result, gone, "the fix would not remove the finding")
        for index, new in enumerate(after):
            if index not in known:
                added = f"the fix would cause {new.rule.code} ({new.rule.name}): {new.message}"
                return _Outcome(result, gone, added)
        return _Outcome(result, gone)

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
