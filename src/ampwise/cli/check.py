"""Find mixed-precision mistakes in scripts and notebooks, without running them.

PATHs are files, folders, or - for stdin. Folders are searched for .py and .ipynb, less what is usually not one's own
(.venv, build, node_modules and the like) and less what the settings exclude; a symlink that leads out of the folder is
not followed. A file given by name is always checked, unless --force-exclude says that the exclusions hold for it too,
as they should under pre-commit.

Examples:
  ampwise check
  ampwise check train.py notebooks/
  ampwise check --fix train.py
  ampwise check --diff --unsafe-fixes .
  ampwise check --select ALL --ignore AMP4,misaligned-dims .
  ampwise check --statistics --exit-zero .
  ampwise check --output-format sarif . > ampwise.sarif
  ampwise check --stdin-filename train.py - < train.py

Rules are selected by code (AMP101), the start of a code (AMP1), name (clip-scaled-grads) or ALL; without --select,
by default those that `ampwise rules` does not call off. The longer selector wins.

A finding is suppressed by `# noqa: AMP101` on its line, at the first or last line of its statement, or by `# ampwise:
noqa: AMP101` anywhere in its file; without a code all findings are. --add-noqa writes such comments.

Settings come from [tool.ampwise] of the nearest pyproject.toml, or from an ampwise.toml with the same keys. They
choose rules, files and the output; that files are written is for the command line alone to say:
  [tool.ampwise]
  select = ["AMP1", "AMP2"]           also: ignore, extend-select
  extend-exclude = ["third_party"]    also: exclude, in the place of the usual list
  output-format = "concise"
  [tool.ampwise.per-file-ignores]
  "tests/*" = ["sync-every-step"]

--fix writes the fixes that change nothing but the mistake; with --unsafe-fixes also those of which that is not proven.
Each is checked before it is written: one after which a finding is still there, or a new one, is left out. A file that
changed meanwhile, or that a symlink has elsewhere, is not written. From stdin the fixed text goes to stdout, and the
findings to stderr.

--diff into a file or a pipe is an exact patch, for `patch -p0`. On a terminal, characters that would act on it or hide
text are shown as escapes, as in all that ampwise prints.

The exit code is 0 when nothing was found, 1 when something was (after --fix: is left; with --diff: would change),
and 2 when nothing could be read or the command makes no sense. With --exit-zero, findings do not count. Files that
cannot be read are named on stderr and counted in the last line, and the rest is checked.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from ampwise.printers import VARIABLE, add_output_arguments, output_format, print_findings
from ampwise.printers.terminal import flush, say, wants_colour, write, write_exact

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import TextIO

    from ampwise.finding import Finding
    from ampwise.lint.check import Choice, Report, Task
    from ampwise.lint.config import Settings
    from ampwise.lint.repair import Repairs

__all__ = ["add_arguments", "run"]

STDIN = "-"
FOR_PEOPLE = ("concise", "full")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="*", default=["."], help="files, folders or - (default: .)")
    for option, what in (("select", "only these rules"), ("ignore", "not these"), ("extend-select", "these as well")):
        parser.add_argument(
            f"--{option}", metavar="RULES", action="append", help=f"{what}: selectors with commas; may be repeated"
        )
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--fix", action=switch, help="fix what can be fixed")
    parser.add_argument("--unsafe-fixes", action=switch, help="also where that may change what the script does")
    parser.add_argument("--diff", action="store_true", help="show what --fix would change, and write nothing")
    parser.add_argument("--add-noqa", action="store_true", help="write a comment that suppresses it at each finding")
    parser.add_argument("--statistics", action="store_true", help="only how often each rule was broken")
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 whatever is found")
    parser.add_argument("--force-exclude", action="store_true", help="pass over what is excluded even if it is a PATH")
    parser.add_argument("--stdin-filename", metavar="FILE", help="what to call stdin, and whose settings to use")
    parser.add_argument("--config", metavar="FILE", help="settings, in the place of those found near each file")
    parser.add_argument("--isolated", action="store_true", help="without any settings")
    parser.add_argument("--jobs", metavar="N", type=_positive, help="processes for many files (default: all cores)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    # Trees of source are many objects and hardly any garbage: the collector would go through them again and again,
    # and parsing take twice as long. The processes we start do the same.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _run(args)
    finally:
        if was_enabled:
            gc.enable()


def _run(args: argparse.Namespace) -> int:
    from ampwise.lint.check import Choice, check_paths
    from ampwise.lint.config import Configs
    from ampwise.lint.select import Layer

    _refuse_nonsense(args)
    configs = Configs(args.config, isolated=args.isolated)
    said = Layer(
        select=_listed(args.select) if args.select else None,
        ignore=_listed(args.ignore),
        extend_select=_listed(args.extend_select),
    )
    choice = Choice(configs, said)
    if args.paths == [STDIN]:
        _settle(args, configs.for_file(args.stdin_filename or ""))
        return _run_stdin(args, choice)
    _settle(args, configs.for_folder("."))
    report, task = check_paths(args.paths, choice, jobs=args.jobs, force_exclude=args.force_exclude)
    if args.add_noqa:
        return _add_noqa(args, report)
    if args.diff:
        return _show_diff(args, report, task)
    fixed = 0
    if args.fix:
        fixed, troubles = _mend_files(args, report, task)
        if fixed:  # a mended file may have changed what is found in others
            report, _ = check_paths(
                args.paths, choice, jobs=args.jobs, progress=False, force_exclude=args.force_exclude
            )
        report.notes += troubles
    return _tell(args, report, fixed)


def _refuse_nonsense(args: argparse.Namespace) -> None:
    from ampwise.errors import BadInput

    if STDIN in args.paths and len(args.paths) > 1:
        raise BadInput("check -: stdin is checked alone; give it or other paths")
    if STDIN in args.paths and args.add_noqa:
        raise BadInput("check --add-noqa -: it writes files, and stdin is none")
    if args.select and not _listed(args.select):  # as of a variable that is not set
        raise BadInput(
            "check --select: it names no rule, so nothing would be checked. `ampwise rules` lists the rules."
        )
    modes = [flag for flag in ("fix", "diff", "add_noqa") if getattr(args, flag)]
    if "add_noqa" in modes and len(modes) > 1:
        raise BadInput("check --add-noqa: it goes with neither --fix nor --diff")


def _settle(args: argparse.Namespace, settings: Settings) -> None:
    """What the command line leaves open, the settings decide; but nothing that writes."""
    if not args.output_format and not os.environ.get(VARIABLE):
        args.output_format = settings.output_format
    args.output_format = output_format(args)


def _listed(options: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for option in options or () for word in option.split(",") if word.strip())


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, from 1 on")
    return number


# What is told.


def _tell(args: argparse.Namespace, report: Report, fixed: int = 0, texts: dict[str, str] | None = None) -> int:
    """Print the report; the exit code."""
    # The mended text has stdout for itself.
    stream = sys.stderr if texts is not None and args.fix else sys.stdout
    _warn(report)
    for_people = args.output_format in FOR_PEOPLE or (args.statistics and args.output_format == "github")
    missed = _missed(report)
    has_all_passed = report.files_checked and not fixed and not missed
    if report.findings or has_all_passed or not for_people:
        _print(args, report, stream, texts)
    if for_people:
        write(_last_lines(report, fixed, missed), stream)
    return _exit_code(args, report, bool(report.findings))


def _print(args: argparse.Namespace, report: Report, stream: TextIO, texts: dict[str, str] | None) -> None:
    if args.statistics:
        from ampwise.printers.statistics import render_statistics

        write(render_statistics(report.findings, args.output_format, wants_colour(stream)), stream)
    else:
        print_findings(report.findings, args.output_format, stream, texts=texts, notes=report.notes)


def _last_lines(report: Report, fixed: int, missed: str) -> str:
    """What the findings alone do not tell; after many of them, nobody sees what was said at first."""
    left = len(report.findings)
    lines = []
    if fixed and left:
        was, remain = "were" if fixed > 1 else "was", "remain" if left > 1 else "remains"
        lines.append(f"Of {fixed + left} findings, {fixed} {was} fixed and {left} {remain}.\n")
    elif fixed:
        lines.append(f"Found {fixed} finding{'s' if fixed > 1 else ''} ({fixed} fixed, 0 remaining).\n")
    if missed and report.files_checked:
        lines.append(f"{missed}.\n" if left or fixed else f"No findings, but {missed}.\n")
    return "".join(lines)


def _missed(report: Report) -> str:
    if not report.unreadable and not report.partly:  # the usual case, and a module less to import
        return ""
    from ampwise.printers.summary import missed

    return missed(len(report.unreadable), len(report.partly))


def _exit_code(args: argparse.Namespace, report: Report, found: bool) -> int:
    if not report.files_checked:
        only_excluded = report.excluded and not report.unreadable
        return 0 if only_excluded else 2
    return 1 if found and not args.exit_zero else 0


def _warn(report: Report) -> None:
    flush(sys.stdout)  # so that a log of both streams has them in order
    for error in report.unreadable:
        say("ampwise: {}: cannot check: {}", error.path, error.reason)
    for note in report.notes:
        say("ampwise: {}", note)


# What is changed.


def _mend_files(args: argparse.Namespace, report: Report, task: Task) -> tuple[int, list[str]]:
    """Write the mended files; how many findings that mended, and what stood in the way of others."""
    from ampwise.lint.repair import repair
    from ampwise.lint.write import write_script
    from ampwise.source.script import Unreadable

    repairs = repair(report.findings, task, unsafe=args.unsafe_fixes)
    fixed, troubles = 0, repairs.notes
    for path, change in repairs.files.items():
        try:
            write_script(change.before, change.text)
        except Unreadable as error:
            troubles.append(f"{path}: {error.reason}")
        else:
            fixed += len(change.mended)
    return fixed, troubles


def _show_diff(args: argparse.Namespace, report: Report, task: Task) -> int:
    from ampwise.lint.repair import repair

    repairs = repair(report.findings, task, unsafe=args.unsafe_fixes)
    report.notes += repairs.notes
    changes = _write_diffs(repairs)
    _warn(report)
    if report.files_checked:
        told = f"would fix {repairs.count} finding{'s' if repairs.count != 1 else ''}" if changes else "nothing to fix"
        missed = _missed(report)
        say("ampwise: {}{}", told, f", but {missed}" if missed else "")
    return _exit_code(args, report, changes)


def _write_diffs(repairs: Repairs) -> bool:
    """Write each diff in the encoding of its file, so that ``patch`` finds the bytes there; whether there was one."""
    from ampwise.lint.fix import unified_diff

    changes = False
    for change in repairs.files.values():
        encoding = change.before.encoding
        data = unified_diff(change.before, change.text).encode(encoding, "backslashreplace")
        write_exact(data, sys.stdout, encoding)
        changes = changes or bool(data)
    return changes


def _add_noqa(args: argparse.Namespace, report: Report) -> int:
    from ampwise.lint.noqa import with_noqa
    from ampwise.lint.write import write_script
    from ampwise.source.script import Unreadable, read_script

    by_file: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_file.setdefault(finding.place.file or "", []).append(finding)
    added = 0
    for path, findings in by_file.items():
        try:
            script = read_script(path)
            write_script(script, with_noqa(script, findings))
        except Unreadable as error:
            report.notes.append(f"{path}: {error.reason}")
        else:
            added += len(findings)
    _warn(report)
    say("Suppressed {} finding{} with comments.", added, "s" if added != 1 else "", stream=sys.stdout)
    return _exit_code(args, report, found=added < len(report.findings))


def _run_stdin(args: argparse.Namespace, choice: Choice) -> int:
    from ampwise.lint.check import Report, check_text
    from ampwise.lint.files import is_excluded
    from ampwise.source.script import Unreadable, decoded

    data = sys.stdin.buffer.read()
    path = args.stdin_filename or STDIN
    if args.force_exclude and args.stdin_filename and is_excluded(path, choice.configs):
        if args.fix and not args.diff:
            write_exact(data, sys.stdout)
        return 0
    try:
        text = decoded(data, path)
    except Unreadable as error:
        if args.fix and not args.diff:
            write_exact(data, sys.stdout)
        return _tell(args, Report(unreadable=[error]), texts={})
    report, task = check_text(text, path, choice)
    if args.diff:
        return _show_diff(args, report, task)
    if not args.fix:
        return _tell(args, report, texts={path: text})
    return _mend_stdin(args, choice, report, task, data)


def _mend_stdin(args: argparse.Namespace, choice: Choice, report: Report, task: Task, data: bytes) -> int:
    from ampwise.lint.check import check_text
    from ampwise.lint.repair import repair

    repairs = repair(report.findings, task, unsafe=args.unsafe_fixes)
    path, text = next(iter(task.texts.items()))
    change = repairs.files.get(path)
    if change is not None:
        text = change.before.file_text(change.text)
        data = change.before.file_bytes(text)
        report, _ = check_text(text, path, choice)
    report.notes += repairs.notes
    write_exact(data, sys.stdout)
    return _tell(args, report, repairs.count, texts={path: text})
