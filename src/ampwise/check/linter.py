"""The driver of the linter: it checks files and returns a report.

An unreadable file or a failing rule is reported in one line and does not stop the run. Files without any word that a
rule needs are skipped; many of the others are split among processes.
"""
# ruff: noqa: PTH120

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ampwise.check.config import CheckSettings, SettingsByFolder
from ampwise.check.files import find_files, ignored_selectors
from ampwise.check.selectors import SelectorLayer, check_selectors, chosen_codes, matching_codes
from ampwise.check.source.script import SourceScript, UnreadableFile, read_bytes, read_script
from ampwise.check.source_rules import matching_rules, source_rules
from ampwise.finding import Finding
from ampwise.finding.frozen import Frozen

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import TypeVar

    from ampwise.check.noqa import Suppressions
    from ampwise.check.source.project import Project

    Read = TypeVar("Read")

__all__ = ["CheckReport", "CheckTask", "RuleSelection", "check_paths", "check_text", "check_texts"]

# With few files, all are parsed to report syntax errors; with more, only those that may have a finding.
FEW_FILES = 50
WORTH_PROCESSES = 1_000_000  # bytes to parse: about a second of work, against 0.1 s to start processes
SHARES_PER_JOB = 4  # more than one, so that no process waits long for the last
DEBUG = "AMPWISE_DEBUG"
# A script that runs the training step itself contains one of these; with a framework, none.
TRAINER_WORDS = (b"loss.backward(", b"loss).backward(", b".scale(", b"GradScaler(", b"unscale_(")


class CheckReport:
    """Result of a check.

    Files in ``unreadable`` were not checked, those in ``partly`` only in part; ``notes`` has the reasons and other
    messages.
    """

    __slots__ = ("excluded", "files_checked", "findings", "notes", "partly", "unreadable")

    def __init__(self, unreadable: list[UnreadableFile] | None = None, notes: list[str] | None = None) -> None:
        self.findings: list[Finding] = []
        self.unreadable = [] if unreadable is None else unreadable
        self.notes = [] if notes is None else notes
        self.partly: list[str] = []
        self.files_checked = 0
        self.excluded = 0  # paths that were given but are excluded

    def add(self, other: CheckReport) -> None:
        """Add the report of another part of the run."""
        self.findings += other.findings
        self.unreadable += other.unreadable
        self.notes += other.notes
        self.partly += other.partly
        self.files_checked += other.files_checked
        self.excluded += other.excluded


class RuleSelection:
    """Rules to check in each file, by the settings and then the command line."""

    def __init__(self, configs: SettingsByFolder, command_line: SelectorLayer | None = None) -> None:
        self.configs = configs
        self._command_line = command_line or SelectorLayer()
        self._rules = [module.RULE for module in source_rules()]
        self._by_settings: dict[str | None, frozenset[str]] = {}
        check_selectors(_selectors(self._command_line), self._rules)

    def codes(self, path: str) -> frozenset[str]:
        """Return the codes of the rules to check in a file."""
        settings = self.configs.for_file(path)
        codes = self._chosen(settings)
        ignored = [code for selector in ignored_selectors(settings, path) for code in self._ignored(selector, settings)]
        return codes.difference(ignored) if ignored else codes

    def _ignored(self, selector: str, settings: CheckSettings) -> list[str]:
        return matching_codes(selector, self._rules, _where(settings, "per-file-ignores"))

    def _chosen(self, settings: CheckSettings) -> frozenset[str]:
        if settings.source not in self._by_settings:
            layer = SelectorLayer(
                select=settings.select,
                ignore=settings.ignore,
                extend_select=settings.extend_select,
                where=_where(settings),
            )
            for selectors in settings.per_file_ignores.values():
                check_selectors(selectors, self._rules, _where(settings, "per-file-ignores"))
            self._by_settings[settings.source] = chosen_codes(self._rules, [layer, self._command_line])
        return self._by_settings[settings.source]


class CheckTask(Frozen):
    """Files to check, with the rules to check in each, and all files of the project, which imports may lead to.

    A rule that checks one file may find a mistake in another, which has none of the rule's words: a helper that clips
    need not mention a scaler. ``wanted`` returns the codes that may be reported in a file; without it, these are
    ``codes``.
    """

    __slots__ = ("project_paths", "codes", "texts", "wanted")  # noqa: RUF023 (the order they are shown in)

    def __init__(
        self,
        project_paths: tuple[str, ...],
        codes: Mapping[str, frozenset[str]],
        texts: Mapping[str, str] | None = None,
        wanted: Callable[[str], frozenset[str]] | None = None,
    ) -> None:
        self.project_paths, self.codes, self.wanted = project_paths, codes, wanted
        self.texts: Mapping[str, str] = texts or {}  # texts to check instead of the files on disk

    def wants(self, finding: Finding) -> bool:
        """Whether to report a finding."""
        path = finding.place.file or ""
        codes = self.wanted(path) if self.wanted else self.codes.get(path, ())
        return finding.rule.code in codes


def check_paths(
    paths: Sequence[str],
    choice: RuleSelection,
    *,
    jobs: int | None = None,
    progress: bool = True,
    force_exclude: bool = False,
) -> tuple[CheckReport, CheckTask]:
    """Check files and folders; return the report and the task, which ``check_texts`` can repeat."""
    found = find_files(paths, choice.configs, force_exclude=force_exclude)
    report = CheckReport(unreadable=found.unreadable, notes=found.notes)
    report.excluded = found.excluded
    sizes: dict[str, int] = {}
    codes: dict[str, frozenset[str]] = {}
    for path, size, possible in _candidates(found.files, report):
        sizes[path], codes[path] = size, choice.codes(path) & possible
    task = CheckTask(tuple(found.files), codes, wanted=choice.codes)
    report.add(_check(task, sizes, jobs, progress))
    return _finished(report, task), task


def check_text(text: str, path: str, choice: RuleSelection) -> tuple[CheckReport, CheckTask]:
    """Check a text that is not on disk, under the name ``path``."""
    task = CheckTask((path,), {path: choice.codes(path)}, {path: text})
    return check_texts(task), task


def check_texts(task: CheckTask) -> CheckReport:
    """Check a task in this process: its texts, and its other files from disk."""
    return _finished(_merged(_reports(task)), task)


def check_share(task: CheckTask) -> CheckReport:
    """Check one share of the files, in a worker process."""
    return _merged(_reports(task, project=_project_of_this_process(task.project_paths)))


@functools.lru_cache(maxsize=1)
def _project_of_this_process(paths: tuple[str, ...]) -> Project:
    """Return one project for all shares of a process, so that common imports are read once per process."""
    from ampwise.check.source.project import Project

    return Project(paths)


def _merged(parts: Iterable[CheckReport]) -> CheckReport:
    report = CheckReport()
    for part in parts:
        report.add(part)
    return report


def _reports(task: CheckTask, project: Project | None = None) -> Iterator[CheckReport]:
    """Yield one report per file, with the findings that no comment suppresses."""
    if not task.texts and not any(task.codes.values()):
        yield from _read_only(task.codes)
        return
    if project is None:
        from ampwise.check.source.project import Project

        project = Project(task.project_paths, task.texts or None)
    rules = source_rules()
    for path, codes in task.codes.items():
        report = CheckReport()
        _check_file(project, path, [rule for rule in rules if rule.RULE.code in codes], report)
        report.notes += project.notes
        project.notes.clear()
        yield _without_suppressed(report, project)


def _read_only(paths: Iterable[str]) -> Iterator[CheckReport]:
    """Yield one report per file for files that no rule applies to: only whether they can be read is checked."""
    for path in paths:
        report = CheckReport()
        script = _try_to_read(read_script, path, report)
        if script is not None:
            _count(script, report)
        yield report


def _check_file(project: Project, path: str, modules: Iterable[ModuleType], report: CheckReport) -> None:
    from ampwise.check.source.execution_paths import MOST_PATHS

    code = _try_to_read(project.code, path, report)
    if code is None:
        return
    _count(code.script, report)
    failed: dict[str, list[str]] = {}  # rules by error: one bug may make many rules fail
    skipped: dict[str, list[str]] = {}  # rules by the limit that was reached
    for module in modules:
        code.given_up.clear()
        try:
            report.findings += module.check_source(code)
        except RecursionError:
            skipped.setdefault(f"{path}: nested too deeply", []).append(module.RULE.code)
        except Exception as error:
            failed.setdefault(_one_line(error), []).append(module.RULE.code)
        for region in dict.fromkeys(code.given_up):
            skipped.setdefault(f"{region.place}: too many paths (at most {MOST_PATHS})", []).append(module.RULE.code)
    limits = code.limits_met
    if failed or skipped or limits:
        report.partly.append(path)
        report.notes += [f"{path}: {_internal(', '.join(codes), what)}" for what, codes in failed.items()]
        report.notes += [f"{limit}; rules not checked here: {', '.join(codes)}" for limit, codes in skipped.items()]
        report.notes += limits


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


def _without_suppressed(report: CheckReport, project: Project) -> CheckReport:
    known: dict[str | None, tuple[SourceScript, Suppressions] | None] = {}
    kept = []
    for finding in report.findings:
        path = finding.place.file
        if path not in known:
            known[path] = _suppressions(project, path, report.findings)
        here = known[path]
        if here is None or not here[1].cover(finding, here[0].line_of(finding.place)):
            kept.append(finding)
    report.findings = kept
    return report


def _suppressions(
    project: Project, path: str | None, findings: Sequence[Finding]
) -> tuple[SourceScript, Suppressions] | None:
    from ampwise.check.noqa import read_suppressions

    if path is None:
        return None
    try:
        script = project.code(path).script
    except UnreadableFile:  # a finding in a file that was not checked itself
        return None
    by_rule = {finding.rule.code: finding for finding in findings}  # comments name rules, not findings
    return script, read_suppressions(script, by_rule.values())


def _finished(report: CheckReport, task: CheckTask) -> CheckReport:
    """Keep only the wanted findings, once each, in the order of files and lines."""
    wanted = [finding for finding in report.findings if task.wants(finding)]
    report.findings = sorted({(found.rule.code, found.place): found for found in wanted}.values(), key=_order)
    # By path, independent of the order of processes; the notes of one file keep their order.
    report.unreadable.sort(key=lambda error: error.path)
    report.notes = sorted(dict.fromkeys(report.notes), key=lambda note: note.partition(": ")[0])
    report.partly = sorted(set(report.partly))
    return report


def _order(finding: Finding) -> tuple[object, ...]:
    place = finding.place
    return (place.file, place.cell or 0, place.line or 0, place.column or 0, finding.rule.code, finding.message)


# Files that are worth parsing.


def _candidates(files: Sequence[str], report: CheckReport) -> Iterator[tuple[str, int, frozenset[str]]]:
    """Yield the files that may have a finding, with their size and the rules whose words they contain.

    Other files are counted as checked, or added to the unreadable ones.
    """
    rules = source_rules()
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
        possible[path] = frozenset(rule.RULE.code for rule in matching_rules(data, rules))
        if possible[path] and any(word in data for word in TRAINER_WORDS):
            trainers.append(path)  # files that it imports may do a part of its step
    if trainers and len(files) > 1:
        from ampwise.check.imported_files import rules_for_imported_files

        for path, codes in rules_for_imported_files(trainers, files, rules):
            possible[path] = possible.get(path, frozenset()) | codes
    for path, size in sizes.items():
        if possible[path] or len(files) <= FEW_FILES:
            yield path, size, possible[path]
        else:
            report.files_checked += 1


# Splitting them among processes.


def _check(task: CheckTask, sizes: Mapping[str, int], jobs: int | None, progress: bool) -> CheckReport:
    from ampwise.check.progress import ProgressBar

    jobs = jobs or _cores()
    many = jobs > 1 and len(sizes) > 1 and sum(sizes.values()) > WORTH_PROCESSES
    report = CheckReport()
    with ProgressBar(len(sizes), sys.stderr if progress else None) as bar:
        for part in _shared_reports(task, sizes, jobs) if many else _reports(task):
            report.add(part)
            bar.advance(part.files_checked + len(part.unreadable))
    return report


def _shared_reports(task: CheckTask, sizes: Mapping[str, int], jobs: int) -> Iterator[CheckReport]:
    from ampwise.check.worker_processes import run_in_processes

    source_rules()  # loaded once, before the processes are forked
    tasks = [
        CheckTask(task.project_paths, {path: task.codes[path] for path in share})
        for share in split_into_shares(sizes, jobs * SHARES_PER_JOB)
    ]
    for part, report in run_in_processes(check_share, tasks, min(jobs, len(tasks))):
        if report is None:
            yield CheckReport(unreadable=[UnreadableFile(path, "the process that read it died") for path in part.codes])
        else:
            yield report


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


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))  # the cores that this process may use, fewer in a container
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _selectors(layer: SelectorLayer) -> tuple[str, ...]:
    return (*(layer.select or ()), *layer.extend_select, *layer.ignore)


def _where(settings: CheckSettings, key: str = "") -> str:
    return f" in {settings.source}{f' ({key})' if key else ''}" if settings.source else ""
