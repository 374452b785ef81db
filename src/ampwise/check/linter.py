"""The driver of the linter: it checks files and returns a report.

An unreadable file or a failing rule is reported in one line and does not stop the run. Files without any word that a
rule needs are skipped; many of the others are split among processes.
"""
# ruff: noqa: PTH120

from __future__ import annotations

import collections
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from ampwise.check.config import SettingsByFolder
from ampwise.check.files import find_files, ignored_selectors
from ampwise.check.selectors import SelectorLayer, check_selectors, chosen_codes, matching_codes
from ampwise.check.source.script import SourceScript, UnreadableFile, read_bytes, read_script
from ampwise.check.source_rules import matching_rules, rules_for_imported_files
from ampwise.finding import Finding, registry

if TYPE_CHECKING:
    from ampwise.check.noqa import Suppressions
    from ampwise.check.source.project import Project, SourceFile
    from ampwise.finding import Place

Read = TypeVar("Read")

# With few files, all are parsed to report syntax errors; with more, only those that may have a finding.
FEW_FILES = 50
WORTH_PROCESSES = 1_000_000  # bytes to parse: about a second of work, against 0.1 s to start processes
SHARES_PER_JOB = 4  # more than one, so that no process waits long for the last
DEBUG = "AMPWISE_DEBUG"
# A script that runs the training step itself contains one of these; with a framework, none.
TRAINER_WORDS = (b"loss.backward(", b"loss).backward(", b".scale(", b"GradScaler(", b"unscale_(")
MIXED_PRECISION = (
    b"autocast",
    b"GradScaler",
    b"float16",
    b".half(",
    b"torch.half",
    b"fp16",
    b"bf16",
    b"MixedPrecision",
)


@dataclass(slots=True)
class CheckReport:
    """Result of a check.

    Files in ``unreadable`` were not checked, those in ``partly`` only in part. ``limits`` has the places where there
    were too many paths or too much code; ``notes`` has the other reasons and messages. ``excluded`` counts paths that
    were given but are excluded.
    """

    findings: list[Finding] = field(default_factory=list)
    unreadable: list[UnreadableFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    partly: list[str] = field(default_factory=list)
    files_checked: int = 0
    mixed_precision: int = 0  # files that mention it
    excluded: int = 0

    def add(self, other: CheckReport) -> None:
        """Add the report of another part of the run."""
        self.findings += other.findings
        self.unreadable += other.unreadable
        self.notes += other.notes
        self.limits += other.limits
        self.partly += other.partly
        self.files_checked += other.files_checked
        self.mixed_precision += other.mixed_precision
        self.excluded += other.excluded


class RuleSelection:
    """Rules to check in each file, by the settings and then the command line."""

    def __init__(self, configs: SettingsByFolder, command_line: SelectorLayer | None = None) -> None:
        self.configs = configs
        self._command_line = command_line or SelectorLayer()
        self._rules = [module.RULE for module in registry.source_rules()]
        self._by_settings: dict[str | None, frozenset[str]] = {}
        layer = self._command_line
        check_selectors((*(layer.select or ()), *layer.extend_select, *layer.ignore), self._rules)

    def codes(self, path: str) -> frozenset[str]:
        """Return the codes of the rules to check in a file."""
        settings = self.configs.for_file(path)
        if settings.source not in self._by_settings:
            where = f" in {settings.source}" if settings.source else ""
            for selectors in settings.per_file_ignores.values():
                check_selectors(selectors, self._rules, f"{where} (per-file-ignores)")
            layer = SelectorLayer(
                select=settings.select, ignore=settings.ignore, extend_select=settings.extend_select, where=where
            )
            self._by_settings[settings.source] = chosen_codes(self._rules, [layer, self._command_line])
        codes = self._by_settings[settings.source]
        for selector in ignored_selectors(settings, path):
            codes = codes.difference(matching_codes(selector, self._rules))
        return codes

    def target_torch(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the oldest torch of the settings for each file that has such a setting."""
        set_to = {path: self.configs.for_file(path).target_torch for path in paths}
        return {path: version for path, version in set_to.items() if version is not None}


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Files to check, with the rules to check in each, and all files of the project, which imports may lead to.

    A rule that checks one file may find a mistake in another, which has none of the rule's words: a helper that clips
    need not mention a scaler. ``wanted`` returns the codes that may be reported in a file; without it, these are
    ``codes``.
    """

    project_paths: tuple[str, ...]
    codes: Mapping[str, frozenset[str]]
    texts: Mapping[str, str] = field(default_factory=dict)  # to check instead of the files on disk
    imported: tuple[str, ...] = ()  # by files given by name: read with them, but not checked
    wanted: Callable[[str], frozenset[str]] | None = None
    target_torch: Mapping[str, str] = field(default_factory=dict)  # the setting, by file that has one


def check_paths(
    paths: Sequence[str],
    choice: RuleSelection,
    *,
    jobs: int | None = None,
    progress: bool = True,
    force_exclude: bool = False,
) -> tuple[CheckReport, CheckTask]:
    """Check files and folders; return the report and the task, which ``check_texts`` can repeat."""
    from ampwise.check.progress import ProgressBar

    found = find_files(paths, choice.configs, force_exclude=force_exclude)
    report = CheckReport(unreadable=found.unreadable, notes=found.notes, excluded=found.excluded)
    sizes, possible = _candidates(found.files, report)
    codes = {path: choice.codes(path) & possible[path] for path in sizes}
    checked = frozenset(found.files)
    # A file given by name is read with what it imports, as in its folder; only its own findings are reported.
    by_name = [path for path in map(os.path.normpath, paths) if path in codes and possible.get(path)]
    imported = [path for path in _imported(by_name) if path not in checked]
    for path in by_name if imported else ():
        codes[path] |= choice.codes(path) & _possible_with(path, imported)
    task = CheckTask(
        tuple(found.files),
        codes,
        imported=tuple(imported),
        wanted=lambda path: choice.codes(path) if path in checked else frozenset(),
        target_torch=choice.target_torch(codes),
    )
    # The cores that this process may use, fewer in a container; only Linux knows.
    jobs = jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) or 1
    many = jobs > 1 and len(sizes) > 1 and sum(sizes.values()) > WORTH_PROCESSES
    with ProgressBar(len(sizes), sys.stderr if progress else None) as bar:
        for part in _shared_reports(task, sizes, jobs) if many else _reports(task):
            report.add(part)
            bar.advance(part.files_checked + len(part.unreadable))
    return _finished(report, task), task


def check_text(text: str, path: str, choice: RuleSelection) -> tuple[CheckReport, CheckTask]:
    """Check a text that is not on disk, under the name ``path``."""
    codes = {path: choice.codes(path)}
    imported = tuple(_imported([path], {path: text}))
    task = CheckTask((path,), codes, {path: text}, imported, target_torch=choice.target_torch(codes))
    report = check_texts(task)
    report.mixed_precision += any(map(text.encode(errors="replace").__contains__, MIXED_PRECISION))
    return report, task


def check_texts(task: CheckTask) -> CheckReport:
    """Check a task in this process: its texts, and its other files from disk."""
    return _finished(_merged(_reports(task)), task)


def _imported(paths: Sequence[str], texts: Mapping[str, str] | None = None) -> list[str]:
    if not paths:
        return []
    from ampwise.check.source.local_imports import files_imported

    return files_imported(paths, texts)


def _possible_with(path: str, imported: Sequence[str]) -> frozenset[str]:
    """Return the rules whose words a training script has together with the files that are read with it."""
    texts = []
    for each in (path, *imported):
        try:
            texts.append(read_bytes(each))
        except UnreadableFile:
            continue
    if not texts or not any(map(texts[0].__contains__, TRAINER_WORDS)):
        return frozenset()
    return frozenset([rule.RULE.code for rule in matching_rules(b"\n".join(texts), registry.source_rules())])


def _candidates(files: Sequence[str], report: CheckReport) -> tuple[dict[str, int], dict[str, frozenset[str]]]:
    """Return the sizes of the files that may have a finding, and the rules whose words each file contains.

    Other files are counted as checked, or added to the unreadable ones.
    """
    rules = registry.source_rules()
    sizes: dict[str, int] = {}
    possible: dict[str, frozenset[str]] = {}
    trainers = []
    for path in files:
        try:
            data = read_bytes(path)
        except UnreadableFile as error:
            report.unreadable.append(error)
            continue
        sizes[path] = len(data)
        report.mixed_precision += any(map(data.__contains__, MIXED_PRECISION))
        possible[path] = frozenset([rule.RULE.code for rule in matching_rules(data, rules)])
        if possible[path] and any(map(data.__contains__, TRAINER_WORDS)):
            trainers.append(path)  # files that it imports may do a part of its step
    if trainers and len(files) > 1:
        for path, codes in rules_for_imported_files(trainers, files, rules):
            possible[path] = possible.get(path, frozenset()) | codes
    if len(files) > FEW_FILES:
        worth_parsing = {path: size for path, size in sizes.items() if possible[path]}
        report.files_checked += len(sizes) - len(worth_parsing)
        sizes = worth_parsing
    return sizes, possible


# Checking files in one process.


def _merged(parts: Iterable[CheckReport]) -> CheckReport:
    report = CheckReport()
    for part in parts:
        report.add(part)
    return report


def _reports(task: CheckTask, project: Project | None = None) -> Iterator[CheckReport]:
    """Yield one report per file, with the findings that no comment suppresses."""
    if project is None and (task.texts or any(task.codes.values())):  # else no rule applies to any of the files
        from ampwise.check.source.project import Project

        project = Project(task.project_paths, task.texts, task.imported, task.target_torch)
    rules = registry.source_rules()
    for path, codes in task.codes.items():
        report = CheckReport()
        if project is None:
            script = _try_to_read(read_script, path, report)
            if script is not None:
                _count(script, report)
        else:
            _check_file(project, path, [rule for rule in rules if rule.RULE.code in codes], report)
            report.notes += project.notes
            if project.limits:
                report.limits += project.limits
                report.partly.append(path)
            project.notes.clear()
            project.limits.clear()
            _drop_suppressed(report, project)
        yield report


def _check_file(project: Project, path: str, modules: Iterable[ModuleType], report: CheckReport) -> None:
    code = _try_to_read(project.code, path, report)
    if code is None:
        return
    _count(code.script, report)
    failed: dict[str, list[str]] = {}  # rules by error: one bug may make many rules fail
    skipped: dict[str, list[str]] = {}  # rules by the limit that was reached
    for module in modules:
        try:
            report.findings += module.check_source(code)
        except RecursionError:
            skipped.setdefault(f"{path}: nested too deeply", []).append(module.RULE.code)
        except Exception as error:
            failed.setdefault(_one_line(error), []).append(module.RULE.code)
    if project.imported:
        report.findings = _in_checked_file(report.findings, code)
    limits = code.limits_met
    if failed or skipped or limits:
        report.partly.append(path)
        report.notes += [f"{path}: {_internal(', '.join(codes), what)}" for what, codes in failed.items()]
        report.notes += [f"{limit}; rules not checked here: {', '.join(codes)}" for limit, codes in skipped.items()]
        report.limits += limits


def _in_checked_file(findings: list[Finding], code: SourceFile) -> list[Finding]:
    """Return the findings; those in files that are read, but not checked, at the calls that lead there, without fixes.

    Several with texts of their own at one place, such as a helper that two steps call, are at one call each.
    """
    shown: list[Finding] = []
    messages: dict[tuple[str, Place], list[str]] = collections.defaultdict(list)
    for finding in findings:
        place = finding.place
        if place.file not in code.project.imported:
            shown.append(finding)
            continue
        calls = code.calls_leading_to(place)
        if calls:
            known = messages[finding.rule.code, place]
            known += [finding.message] if finding.message not in known else []
            call = calls[min(known.index(finding.message), len(calls) - 1)]
            message = finding.message.replace(f" of {code.path}", "") + f" (in {place})"
            shown.append(replace(finding, place=code.script.place(call), message=message, edits=(), safe=False))
    return shown


def _try_to_read(read: Callable[[str], Read], path: str, report: CheckReport) -> Read | None:
    """Read a file; if it cannot be read, return None and add it to the report."""
    try:
        return read(path)
    except UnreadableFile as error:
        report.unreadable.append(error)
    except Exception as error:  # a bug of ours must not stop the check of other files
        report.unreadable.append(UnreadableFile(path, _internal("reading it", _one_line(error))))
    return None


def _count(script: SourceScript, report: CheckReport) -> None:
    report.files_checked += 1
    if script.notes:
        report.partly.append(script.path)
        report.notes += [f"{script.path}: {note}" for note in script.notes]


def _one_line(error: Exception) -> str:
    """Return an internal error in one line; with AMPWISE_DEBUG set, raise it."""
    if os.environ.get(DEBUG):
        raise error
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _internal(where: str, what: str) -> str:
    return f"internal error in {where}: {what}; please report it ({DEBUG}=1 shows the traceback)"


def _drop_suppressed(report: CheckReport, project: Project) -> None:
    """Remove the findings that a comment in their file suppresses."""
    if not report.findings:
        return
    from ampwise.check.noqa import read_suppressions

    by_rule = {finding.rule.code: finding for finding in report.findings}  # comments name rules, not findings
    known: dict[str, tuple[SourceScript, Suppressions] | None] = {}
    kept = []
    for finding in report.findings:
        path = finding.place.file
        if path is not None and path not in known:
            try:
                script = project.code(path).script
                known[path] = script, read_suppressions(script, by_rule.values())
            except UnreadableFile:  # a finding in a file that was not checked itself
                known[path] = None
        here = known[path] if path is not None else None
        if here is None or not here[1].cover(finding, here[0].line_of(finding.place)):
            kept.append(finding)
    report.findings = kept


def _finished(report: CheckReport, task: CheckTask) -> CheckReport:
    """Keep only the wanted findings, once each, in the order of files and lines."""
    found: dict[object, Finding] = {}
    for finding in report.findings:
        path = finding.place.file or ""
        if finding.rule.code in (task.wanted(path) if task.wanted else task.codes.get(path, ())):
            found[finding.rule.code, finding.place] = finding
    position = operator.attrgetter("place.file", "place.cell", "place.line", "place.column", "rule.code", "message")
    report.findings = sorted(found.values(), key=lambda finding: [part or 0 for part in position(finding)])
    # By path, independent of the order of processes; the notes of one file keep their order.
    report.unreadable.sort(key=lambda error: error.path)
    for notes in (report.notes, report.limits):
        notes[:] = sorted(dict.fromkeys(notes), key=lambda note: note.partition(": ")[0])
    report.partly = sorted(set(report.partly))
    return report


# Splitting the files among processes.


def _shared_reports(task: CheckTask, sizes: Mapping[str, int], jobs: int) -> Iterator[CheckReport]:
    """Yield a report for each share of the files, as processes finish them; the run survives if one dies."""
    registry.source_rules()  # loaded once, before the processes are forked
    shares = split_into_shares(sizes, jobs * SHARES_PER_JOB)
    codes = [{path: task.codes[path] for path in share} for share in shares]
    tasks = [replace(task, codes=each, wanted=None) for each in codes]  # a process cannot be sent a lambda
    lost = []
    for part, report in _in_pool(tasks, min(jobs, len(tasks))):
        if report is None:
            lost.append(part)
        else:
            yield report
    # One process that dies breaks the whole pool: each lost share gets a process of its own.
    for part in lost:
        for _, report in _in_pool([part], 1):
            died = [UnreadableFile(path, "the process that read it died") for path in part.codes]
            yield CheckReport(unreadable=died) if report is None else report


def _in_pool(tasks: Sequence[CheckTask], jobs: int) -> Iterator[tuple[CheckTask, CheckReport | None]]:
    """Yield each task with its report, as they finish; None if the pool was broken before."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Forked processes have the rules already loaded; forking is safe on Linux only.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_set_up_worker)
    try:
        futures = {pool.submit(check_share, task): task for task in tasks}
        for future in as_completed(futures):
            try:
                report = future.result()
            except BrokenProcessPool:
                report = None
            yield futures[future], report
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _set_up_worker() -> None:
    import gc
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    gc.disable()  # as in the parent, see cli/check.py; needed here for processes that are not forked


def check_share(task: CheckTask) -> CheckReport:
    """Check one share of the files, in a worker process."""
    return _merged(_reports(task, project=_project_of_this_process(task)))


def _project_of_this_process(task: CheckTask) -> Project:
    """Return one project for all shares of a process, so that common imports are read once per process."""
    return _project_of(task.project_paths, task.imported, tuple(sorted(task.target_torch.items())))


@functools.lru_cache(maxsize=1)
def _project_of(
    paths: tuple[str, ...], imported: tuple[str, ...], target_torch: tuple[tuple[str, str], ...]
) -> Project:
    from ampwise.check.source.project import Project

    return Project(paths, None, imported, dict(target_torch))


def split_into_shares(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Split the files into about ``number`` parts of similar size, in order.

    Modules that import each other are mostly in one folder, and each process reads imported files itself; so a part
    ends at the end of a folder if that is near.
    """
    full = max(1, sum(sizes.values()) // number)
    parts: list[list[str]] = [[]]
    folder, filled = None, 0
    for path, size in sizes.items():
        is_new_folder = os.path.dirname(path) != folder
        if parts[-1] and (filled >= 2 * full or (filled >= full // 2 and is_new_folder)):
            parts.append([])
            filled = 0
        parts[-1].append(path)
        folder, filled = os.path.dirname(path), filled + size
    return [part for part in parts if part]
