"""Fix findings in passes of check and fix until no fix is left. Nothing is written here.

A fix is accepted only if a check of the fixed text shows that its finding is gone and there is no new one. So each
pass leaves fewer findings, and the loop ends.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

from ampwise.check import linter
from ampwise.check.apply_edits import FixedScript, apply_fixes
from ampwise.check.source.project import Project
from ampwise.check.source.script import SourceScript, UnreadableFile, read_script, script_from_text
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Finding, Place, registry


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
    project = Project(task.project_paths, texts, task.imported, task.target_torch)
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
    """Result of some fixes: the script, the findings that are gone, and the reason against it, if any.

    ``blamed`` are the fixes that seem to be the reason, each with its problem; it may be empty.
    """

    result: FixedScript
    gone: list[Finding] = field(default_factory=list)
    problem: str | None = None
    blamed: list[tuple[Finding, str]] = field(default_factory=list)


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
        taken, refused = _Outcome(apply_fixes(self._script, (), unsafe=True)), []
        groups = [list(findings)]
        while groups:
            group = [finding for finding in groups.pop() if finding not in taken.gone]  # else fixed by an earlier fix
            if not group:
                continue
            tried = self._outcome(apply_fixes(self._script, [*taken.result.fixed, *group], unsafe=True))
            if tried.problem is None:
                taken = tried
                continue
            # The fixes to blame are left out; or else the group is tried in halves. So a few bad fixes among many cost
            # a few checks.
            blamed = [(finding, why) for finding, why in tried.blamed if finding in group]
            if len(group) == 1:
                blamed = [(group[0], tried.problem)]
            refused += [f"{finding.place}: {finding.rule.code} not fixed: {why}" for finding, why in blamed]
            rest = [finding for finding in group if finding not in [bad for bad, _ in blamed]]
            half = len(rest) if blamed else (len(rest) + 1) // 2
            groups += [rest[half:], rest[:half]]
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
        made = {edit for fixed in result.fixed for edit in fixed.edits}
        spans = [(*self._script.offsets(edit), len(edit.content)) for edit in made]
        gone, known = [], set()
        for old in self.before:
            first, last = self._range_after(old, spans)
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
        kept = [finding for finding in result.fixed if finding not in gone]
        if kept:
            problem = "the fix would not remove the finding"
            return _Outcome(result, gone, problem, [(finding, problem) for finding in kept])
        places = [{(finding.rule.code, finding.place) for finding in found} for found in (self.before, after)]
        counts = [collections.Counter([code for code, _ in found]) for found in places]
        added = [
            new
            for index, new in enumerate(after)
            if index not in known or counts[1][new.rule.code] > counts[0][new.rule.code]
        ]
        if not added:
            return _Outcome(result, gone)
        blamed = []
        before_functions, after_functions = _functions(self._script), _functions(result.script)
        for new in added if len(before_functions) == len(after_functions) else ():
            home = _function_at(result.script, new.place, after_functions)
            here = [
                finding
                for finding in result.fixed
                if new.place.file == finding.place.file
                and home == _function_at(self._script, finding.place, before_functions)
            ]
            if len(here) == 1:  # the only fix in the function of the new finding
                blamed.append((here[0], _would_cause(new)))
        return _Outcome(result, gone, _would_cause(added[0]), blamed)

    def _range_after(self, finding: Finding, spans: list[tuple[int, int, int]]) -> tuple[int, int]:
        """Return the first and last offset at which a finding may begin after edits: start, end and new length each."""
        first = last = offset = _offset_of(self._script, finding)
        if finding.place.file != self._script.path:
            return first, last
        for start, stop, length in spans:
            if stop < offset or start < stop == offset:
                first += length - (stop - start)
                last += length - (stop - start)
            elif start <= offset:  # inside replaced text, or at an insertion
                first -= offset - start
                last += length
        return first, last


def _would_cause(new: Finding) -> str:
    return f"the fix would cause {new.rule.code} ({new.rule.name}): {new.message}"


def _functions(script: SourceScript) -> list[tuple[int, int]]:
    """Return the first and last line of each function, in an order that fixes do not change."""
    nodes = [node for node in walk(script.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.lineno, node.end_lineno or node.lineno) for node in nodes]


def _function_at(script: SourceScript, place: Place, functions: list[tuple[int, int]]) -> int:
    """Return the index of the innermost function at a place; -1 outside of all."""
    line = script.line_of(place)
    return max([index for index, (first, last) in enumerate(functions) if first <= line <= last], default=-1)


def _offset_of(script: SourceScript, finding: Finding) -> int:
    """Return the offset of a finding; in another file than ``script``, a number from its line and column."""
    place = finding.place
    if place.file != script.path:
        return (place.line or 1) * 10_000 + (place.column or 1)
    return script.offset(place.line or 1, place.column or 1, place.cell)
