"""The driver: files in, a report out.

A file that cannot be read, and a rule that fails, cost a line and never the run. Files without the words that matter
are passed over; of the others, many are shared among processes.
"""
# ruff: noqa: PTH120

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ampwise.finding import Finding
from ampwise.frozen import Frozen
from ampwise.lint.config import Configs, Settings
from ampwise.lint.files import find_files, ignored_by
from ampwise.lint.select import Layer, check_selectors, chosen_codes, matching_codes
from ampwise.source.script import Script, Unreadable, read_bytes, read_script

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import TypeVar

    from ampwise.lint.noqa import Suppressions
    from ampwise.rules import Listed
    from ampwise.source.project import Project

    Read = TypeVar("Read")

__all__ = ["Choice", "Report", "Task", "check_paths", "check_text", "check_texts", "source_rules"]

# Among few files a broken one is worth telling even if it can hold no finding; in a tree the rest pays for that.
FEW_FILES = 50
WORTH_PROCESSES = 1_000_000  # bytes to parse; a second of work or so, against a tenth to start processes
SHARES_PER_JOB = 4  # so that no process waits long for the last one
DEBUG = "AMPWISE_DEBUG"
# A script that runs the step itself says one of these; where a framework does, none.
TRAINER_WORDS = (b"loss.backward(", b"loss).backward(", b".scale(", b"GradScaler(", b"unscale_(")


class Report:
    """What came of a run.

    ``unreadable`` were not checked, and ``partly`` only in part: ``notes`` say why, and all else worth saying.
    """

    __slots__ = ("excluded", "files_checked", "findings", "notes", "partly", "unreadable")

    def __init__(self, unreadable: list[Unreadable] | None = None, notes: list[str] | None = None) -> None:
        self.findings: list[Finding] = []
        self.unreadable = [] if unreadable is None else unreadable
        self.notes = [] if notes is None else notes
        self.partly: list[str] = []
        self.files_checked = 0
        self.excluded = 0  # paths that were given and passed over

    def add(self, other: Report) -> None:
        """Take in what another part of the run reported."""
        self.findings += other.findings
        self.unreadable += other.unreadable
        self.notes += other.notes
        self.partly += other.partly
        self.files_checked += other.files_checked
        self.excluded += other.excluded


class Choice:
    """Which rules to look for in which file: what the settings say, and after them the command line."""

    def __init__(self, configs: Configs, command_line: Layer | None = None) -> None:
        self.configs = configs
        self._command_line = command_line or Layer()
        self._rules = source_rules()
        self._by_settings: dict[str | None, frozenset[str]] = {}
        check_selectors(_selectors(self._command_line), self._rules)

    def codes(self, path: str) -> frozenset[str]:
        """The codes of the rules to look for in a file."""
        settings = self.configs.for_file(path)
        codes = self._chosen(settings)
        ignored = [code for selector in ignored_by(settings, path) for code in self._ignored(selector, settings)]
        return codes.difference(ignored) if ignored else codes

    def _ignored(self, selector: str, settings: Settings) -> list[str]:
        return matching_codes(selector, self._rules, _where(settings, "per-file-ignores"))

    def _chosen(self, settings: Settings) -> frozenset[str]:
        if settings.source not in self._by_settings:
            said = Layer(
                select=settings.select,
                ignore=settings.ignore,
                extend_select=settings.extend_select,
                where=_where(settings),
            )
            for selectors in settings.per_file_ignores.values():
                check_selectors(selectors, self._rules, _where(settings, "per-file-ignores"))
            self._by_settings[settings.source] = chosen_codes(self._rules, [said, self._command_line])
        return self._by_settings[settings.source]


class Task(Frozen):
    """Files to look at, with the rules to look for in each, among the files that may be looked into.

    A rule that looks at one file may find a mistake in another, which has not the words for it: a helper that clips
    knows of no scaler. ``asked`` says which findings are wanted where; without it, those looked for there.
    """

    __slots__ = ("project_paths", "codes", "texts", "asked")  # noqa: RUF023 (the order they are shown in)

    def __init__(
        self,
        project_paths: tuple[str, ...],
        codes: Mapping[str, frozenset[str]],
        texts: Mapping[str, str] | None = None,
        asked: Callable[[str], frozenset[str]] | None = None,
    ) -> None:
        self.project_paths, self.codes, self.asked = project_paths, codes, asked
        self.texts: Mapping[str, str] = texts or {}  # of files that are not, or not yet, on disk

    def wants(self, finding: Finding) -> bool:
        """Whether a finding is one of those asked for."""
        path = finding.place.file or ""
        codes = self.asked(path) if self.asked else self.codes.get(path, ())
        return finding.rule.code in codes


def source_rules() -> list[Listed]:
    """The rules that look at source."""
    from ampwise.rules import listed

    return listed("source")


def check_paths(
    paths: Sequence[str],
    choice: Choice,
    *,
    jobs: int | None = None,
    progress: bool = True,
    force_exclude: bool = False,
) -> tuple[Report, Task]:
    """Check files and folders; the report, and the task it is of, which ``check_texts`` can repeat."""
    found = find_files(paths, choice.configs, force_exclude=force_exclude)
    report = Report(unreadable=found.unreadable, notes=found.notes)
    report.excluded = found.excluded
    sizes: dict[str, int] = {}
    codes: dict[str, frozenset[str]] = {}
    for path, size, possible in _candidates(found.files, report):
        sizes[path], codes[path] = size, choice.codes(path) & possible
    task = Task(tuple(found.files), codes, asked=choice.codes)
    report.add(_check(task, sizes, jobs, progress))
    return _finished(report, task), task


def check_text(text: str, path: str, choice: Choice) -> tuple[Report, Task]:
    """Check a text that is not on disk, under the name it is to have."""
    task = Task((path,), {path: choice.codes(path)}, {path: text})
    return check_texts(task), task


def check_texts(task: Task) -> Report:
    """Check a task in this process: its texts, and its other files as they are on disk."""
    return _finished(_together(_reports(task)), task)


def check_share(task: Task) -> Report:
    """What a process of its own does with one of its shares."""
    return _together(_reports(task, project=_project_of_this_process(task.project_paths)))


@functools.lru_cache(maxsize=1)
def _project_of_this_process(paths: tuple[str, ...]) -> Project:
    """One for all the shares: what they import in common is read once a process, and not once a share."""
    from ampwise.source.project import Project

    return Project(paths)


def _together(parts: Iterable[Report]) -> Report:
    report = Report()
    for part in parts:
        report.add(part)
    return report


def _reports(task: Task, project: Project | None = None) -> Iterator[Report]:
    """A report a file, of all the findings that no comment suppresses."""
    if not task.texts and not any(task.codes.values()):
        yield from _only_read(task.codes)
        return
    if project is None:
        from ampwise.source.project import Project

        project = Project(task.project_paths, task.texts or None)
    rules = source_rules()
    for path, codes in task.codes.items():
        report = Report()
        _check_file(project, path, [rule.module for rule in rules if rule.code in codes], report)
        report.notes += project.notes
        project.notes.clear()
        yield _without_suppressed(report, project)


def _only_read(paths: Iterable[str]) -> Iterator[Report]:
    """The same for files that no rule has words in: whether they can be read needs nothing of what rules need."""
    for path in paths:
        report = Report()
        script = _tried(read_script, path, report)
        if script is not None:
            _count(script, report)
        yield report


def _check_file(project: Project, path: str, modules: Iterable[ModuleType], report: Report) -> None:
    from ampwise.source.paths import MOST_PATHS

    code = _tried(project.code, path, report)
    if code is None:
        return
    _count(code.script, report)
    failed: dict[str, list[str]] = {}  # by what happened: one mistake may make many rules fail
    skipped: dict[str, list[str]] = {}  # by the limit that was met
    for module in modules:
        code.given_up.clear()
        try:
            report.findings += module.check(code)
        except RecursionError:
            skipped.setdefault(f"{path}: nested too deeply", []).append(module.RULE.code)
        except Exception as error:
            failed.setdefault(_told(error), []).append(module.RULE.code)
        for region in dict.fromkeys(code.given_up):
            skipped.setdefault(f"{region.place}: too many paths (at most {MOST_PATHS})", []).append(module.RULE.code)
    limits = code.limits_met
    if failed or skipped or limits:
        report.partly.append(path)
        report.notes += [f"{path}: {_internal(', '.join(codes), what)}" for what, codes in failed.items()]
        report.notes += [f"{limit}; not checked here: {', '.join(codes)}" for limit, codes in skipped.items()]
        report.notes += limits


def _tried(read: Callable[[str], Read], path: str, report: Report) -> Read | None:
    """What a file holds; None, and a line in the report, when it cannot be read."""
    try:
        return read(path)
    except Unreadable as error:
        report.unreadable.append(error)
    except Exception as error:  # a mistake of ours must not cost the other files
        report.unreadable.append(Unreadable(path, _internal("reading it", _told(error))))
    return None


def _count(script: Script, report: Report) -> None:
    report.files_checked += 1
    if script.notes:
        report.partly.append(script.path)
        report.notes += [f"{script.path}: {note}" for note in script.notes]


def _told(error: Exception) -> str:
    """A mistake of ours, or of a plugin's, in one line; under AMPWISE_DEBUG it is raised."""
    if os.environ.get(DEBUG):
        raise error
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _internal(where: str, what: str) -> str:
    return f"internal error in {where}: {what}; please report it ({DEBUG}=1 shows where)"


def _without_suppressed(report: Report, project: Project) -> Report:
    known: dict[str | None, tuple[Script, Suppressions] | None] = {}
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
) -> tuple[Script, Suppressions] | None:
    from ampwise.lint.noqa import suppressions

    if path is None:
        return None
    try:
        script = project.code(path).script
    except Unreadable:  # a finding in a file that was only looked into
        return None
    by_rule = {finding.rule.code: finding for finding in findings}  # comments speak of rules
    return script, suppressions(script, by_rule.values())


def _finished(report: Report, task: Task) -> Report:
    """Only what was asked for, once each, in the order of files and lines."""
    asked = [finding for finding in report.findings if task.wants(finding)]
    report.findings = sorted({(found.rule.code, found.place): found for found in asked}.values(), key=_order)
    # By path, whichever process was first; what is said of one file stays as it is.
    report.unreadable.sort(key=lambda error: error.path)
    report.notes = sorted(dict.fromkeys(report.notes), key=lambda note: note.partition(": ")[0])
    report.partly = sorted(set(report.partly))
    return report


def _order(finding: Finding) -> tuple[object, ...]:
    place = finding.place
    return (place.file, place.cell or 0, place.line or 0, place.column or 0, finding.rule.code, finding.message)


# Which files are worth parsing.


def _candidates(files: Sequence[str], report: Report) -> Iterator[tuple[str, int, frozenset[str]]]:
    """The files that may hold a finding, with their size and the rules that have words in them.

    The others are counted, or found unreadable.
    """
    from ampwise.rules import with_words_in

    rules = source_rules()
    sizes: dict[str, int] = {}
    possible: dict[str, frozenset[str]] = {}
    trainers = []
    for path in files:
        try:
            data = read_bytes(path)
        except Unreadable as error:
            report.unreadable.append(error)
            continue
        sizes[path] = len(data)
        possible[path] = frozenset(rule.code for rule in with_words_in(data, rules))
        if possible[path] and any(word in data for word in TRAINER_WORDS):
            trainers.append(path)  # other files may have a part in its step
    if trainers and len(files) > 1:
        from ampwise.lint.together import rules_together

        for path, codes in rules_together(trainers, files, rules):
            possible[path] = possible.get(path, frozenset()) | codes
    for path, size in sizes.items():
        if possible[path] or len(files) <= FEW_FILES:
            yield path, size, possible[path]
        else:
            report.files_checked += 1


# Sharing them among processes.


def _check(task: Task, sizes: Mapping[str, int], jobs: int | None, progress: bool) -> Report:
    from ampwise.lint.progress import Progress

    jobs = jobs or _cores()
    many = jobs > 1 and len(sizes) > 1 and sum(sizes.values()) > WORTH_PROCESSES
    report = Report()
    with Progress(len(sizes), sys.stderr if progress else None) as bar:
        for part in _shared_reports(task, sizes, jobs) if many else _reports(task):
            report.add(part)
            bar.advance(part.files_checked + len(part.unreadable))
    return report


def _shared_reports(task: Task, sizes: Mapping[str, int], jobs: int) -> Iterator[Report]:
    from ampwise.lint.processes import in_processes

    wanted = frozenset[str]().union(*task.codes.values())
    for rule in source_rules():
        if rule.code in wanted:
            _ = rule.module  # loaded once here, before the processes are forked
    tasks = [
        Task(task.project_paths, {path: task.codes[path] for path in share})
        for share in shares(sizes, jobs * SHARES_PER_JOB)
    ]
    for part, report in in_processes(check_share, tasks, min(jobs, len(tasks))):
        if report is None:
            yield Report(unreadable=[Unreadable(path, "the process that read it died") for path in part.codes])
        else:
            yield report


def shares(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """The files in about ``number`` parts of like size, in order.

    Modules that import each other mostly lie in one folder, and each process reads what it needs for itself; so a
    part ends where a folder does, if that is near.
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
        return len(os.sched_getaffinity(0))  # what this process may use, which in a container is less than there is
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _selectors(layer: Layer) -> tuple[str, ...]:
    return (*(layer.select or ()), *layer.extend_select, *layer.ignore)


def _where(settings: Settings, key: str = "") -> str:
    return f" in {settings.source}{f' ({key})' if key else ''}" if settings.source else ""
