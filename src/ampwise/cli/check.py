"""Find mixed-precision mistakes, without running the script.

PATHs are files, folders, or - for stdin. Folders are searched for .py and .ipynb files, except in folders such as
.venv, build and node_modules, and except what the settings exclude; a symlink that leads out of the folder is not
followed. A file given by name is always checked, unless --force-exclude applies the exclusions to it, too (use it with
pre-commit); what it imports from its folder or the current one is read with it, and not checked. --exclude adds to what
the settings exclude; --show-files lists what is left.

Examples:
  ampwise check
  ampwise check train.py notebooks/
  ampwise check --fix train.py
  ampwise check --watch train.py
  ampwise check --exclude tests,'*_old.py' --show-files .
  ampwise check --diff --unsafe-fixes .
  ampwise check --select ALL --ignore AMP4,misaligned-dims .
  ampwise check --statistics --exit-zero .
  ampwise check --output-format sarif . > ampwise.sarif
  ampwise check --stdin-filename train.py - < train.py

Rules are selected by code (AMP101), the start of a code (AMP1), name (clip-scaled-grads) or ALL. Without --select, all
rules are on except those that `ampwise explain` marks as off by default. The longer selector wins.

`# noqa: AMP101` suppresses a finding on its line, or on the first or last line of its statement; `# ampwise: noqa:
AMP101` suppresses it in the whole file. Without a code, all findings are suppressed. --add-noqa writes such comments.

Settings come from [tool.ampwise] in the nearest pyproject.toml, or from an ampwise.toml with the same keys. They
choose rules, files, the output format and the oldest torch; only the command line can make ampwise write files:
  [tool.ampwise]
  select = ["AMP1", "AMP2"]           also: ignore, extend-select
  extend-exclude = ["third_party"]    also: exclude, instead of the defaults
  output-format = "concise"
  target-torch = "2.2"                the oldest torch that fixes must work with
  [tool.ampwise.per-file-ignores]
  "tests/*" = ["sync-every-step"]

--fix writes the fixes that change nothing but the mistake; --unsafe-fixes adds those for which this is not proven. Each
fix is checked before it is written: if its finding remains, or a new one appears, the fix is left out. A file that has
changed since it was read, or that is a symlink out of the folder, is not written. With -, the fixed text goes to stdout
and the findings to stderr.

--watch checks again whenever a file changes, appears or disappears, or the settings do, until Ctrl-C.

--diff into a file or a pipe is an exact patch for `patch -p0`. On a terminal, control characters and characters that
hide text are shown as escapes, as in all of ampwise's output.

The exit code is 0 without findings, 1 with findings (after --fix: remaining ones; with --diff: if a file would change),
and 2 if a file could not be checked, such as one with a syntax error, or the arguments are wrong. With --exit-zero,
findings give 0, too. Files that cannot be checked are named on stderr, counted in the last line, and an error in the
formats for programs; the other files are still checked. A file that is checked only in part does not change the code.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.cli._arguments import count
from ampwise.errors import AmpwiseError, BadInput
from ampwise.finding.terminal import flush, paint, printable, redraw, say, wants_colour, write, write_exact
from ampwise.report.printers import VARIABLE, add_output_arguments, known_output_format, output_format, print_findings

if TYPE_CHECKING:
    from ampwise.check.config import CheckSettings
    from ampwise.check.linter import CheckReport, CheckTask, RuleSelection
    from ampwise.finding import Finding

GROUP = "Find bugs"
STDIN = "-"
LOOK_EVERY_S = 0.5  # for changed files
FOR_PEOPLE = ("concise", "full")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="*", default=["."], help="files, folders or - (default: .)")
    for option, what in (("select", "only these rules"), ("ignore", "not these"), ("extend-select", "these as well")):
        add(f"--{option}", metavar="RULES", action="append", help=f"{what}: comma-separated; may be repeated")
    switch = argparse.BooleanOptionalAction
    add("--fix", action=switch, help="fix what can be fixed")
    add("--unsafe-fixes", action=switch, help="include fixes that may change what the script does")
    add("--diff", action="store_true", help="show what --fix would change, and write nothing")
    add("--add-noqa", action="store_true", help="suppress each finding with a comment in the file")
    add("-v", "--verbose", action="store_true", help="list what was not followed: too many paths, too much code")
    add("--statistics", action="store_true", help="only show how often each rule was broken")
    add("--exit-zero", action="store_true", help="exit with 0 even if there are findings")
    add("--exclude", metavar="PATTERN", action="append", help="skip these, too: comma-separated; may be repeated")
    add("--force-exclude", action="store_true", help="apply exclusions to PATHs given by name, too")
    add("--show-files", action="store_true", help="only list the files that would be checked")
    add("--watch", action="store_true", help="check again when a file changes, until Ctrl-C")
    add("--stdin-filename", metavar="FILE", help="the name of stdin in findings and for settings")
    add("--config", metavar="FILE", help="read settings from this file only")
    add("--isolated", action="store_true", help="ignore all settings files")
    add("--jobs", metavar="N", type=count, help="processes for many files (default: all cores)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    # Syntax trees are many objects and hardly any garbage: with the collector on, parsing takes twice as long.
    # Worker processes switch it off, too.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _watch(args) if args.watch else _run(args)
    finally:
        if was_enabled:
            gc.enable()


def _run(args: argparse.Namespace) -> int:
    from ampwise.check.config import SettingsByFolder
    from ampwise.check.files import find_files
    from ampwise.check.linter import CheckReport, RuleSelection, check_paths
    from ampwise.check.selectors import SelectorLayer

    if STDIN in args.paths and len(args.paths) > 1:
        raise BadInput("check -: cannot combine stdin with other paths; run them separately")
    if STDIN in args.paths and args.add_noqa:
        raise BadInput("check --add-noqa -: --add-noqa writes files and cannot be used with stdin")
    if args.select and not _listed(args.select):  # e.g. from an unset variable
        raise BadInput("check --select: no rule was given. `ampwise explain` lists the rules.")
    if args.add_noqa and (args.fix or args.diff):
        raise BadInput("check --add-noqa: cannot be combined with --fix or --diff")
    if args.watch and (STDIN in args.paths or args.diff or args.add_noqa or args.show_files):
        raise BadInput("check --watch: cannot be combined with stdin, --diff, --add-noqa or --show-files")
    configs = SettingsByFolder(args.config, isolated=args.isolated, exclude=_listed(args.exclude))
    command_line = SelectorLayer(
        select=_listed(args.select) if args.select else None,
        ignore=_listed(args.ignore),
        extend_select=_listed(args.extend_select),
    )
    choice = RuleSelection(configs, command_line)
    if args.show_files:
        found = find_files(args.paths, configs, force_exclude=args.force_exclude)
        write("".join(f"{printable(path)}\n" for path in found.files), sys.stdout)
        _warn(args, CheckReport(unreadable=found.unreadable, notes=found.notes))
        return 2 if found.unreadable else 0
    if args.paths == [STDIN]:
        _set_output_format(args, configs.for_file(args.stdin_filename or ""))
        return _run_stdin(args, choice)
    _set_output_format(args, configs.for_folder("."))
    report, task = check_paths(args.paths, choice, jobs=args.jobs, force_exclude=args.force_exclude)
    if args.add_noqa:
        return _add_noqa(args, report)
    if args.diff:
        return _show_diff(args, report, task)
    fixed = 0
    if args.fix:
        fixed, problems = _fix_files(args, report, task)
        if fixed:  # a fix in one file may change the findings in others
            report, _ = check_paths(
                args.paths, choice, jobs=args.jobs, progress=False, force_exclude=args.force_exclude
            )
        report.notes += problems
    return _print_report(args, report, fixed)


def _watch(args: argparse.Namespace) -> int:
    """Check again whenever a file or its settings change, until Ctrl-C."""
    import time

    from ampwise.check.config import SettingsByFolder
    from ampwise.check.files import find_files

    def state() -> dict[str, tuple[int, int]]:
        """Return the time of change and the size of each file to check, and of the settings files."""
        try:
            configs = SettingsByFolder(args.config, isolated=args.isolated, exclude=_listed(args.exclude))
            files = find_files(args.paths, configs, force_exclude=args.force_exclude).files
            sources = {configs.for_file(path).source for path in files} | {configs.for_folder(".").source}
        except BadInput as error:  # in the settings, and to be corrected there
            return {str(error): (0, 0)}
        found = {}
        for path in [*files, *filter(None, sources)]:
            with contextlib.suppress(OSError):  # it has just been removed
                status = os.stat(path)  # noqa: PTH116
                found[path] = (status.st_mtime_ns, status.st_size)
        return found

    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    is_first = True
    try:
        while True:
            seen = state()
            try:
                _run(argparse.Namespace(**vars(args)))
            except AmpwiseError as error:
                if is_first:  # wrong arguments
                    raise
                say("ampwise: error: {}", error)
            is_first = False
            if args.fix:  # what it wrote is not a change
                seen = state()
            gc.collect()  # it is switched off, and each check leaves syntax trees
            flush(sys.stdout)
            line = f"ampwise: watching {len(seen)} file{'s' if len(seen) != 1 else ''}; Ctrl-C ends"
            if on_terminal:
                redraw(line, sys.stderr)
            else:
                say("{}", line)
            took_s, now = 0.0, seen
            while now == seen:
                time.sleep(max(LOOK_EVERY_S, 9 * took_s))  # at a large folder, look less often
                began = time.monotonic()
                now = state()
                took_s = time.monotonic() - began
            changed = sorted({path for path, _ in now.items() ^ seen.items()})
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            if on_terminal:
                redraw("", sys.stderr)
            say("ampwise: {} changed at {}", f"{changed[0]}{more}", time.strftime("%H:%M:%S"))
    except KeyboardInterrupt:
        say("")
        return 0


def _set_output_format(args: argparse.Namespace, settings: CheckSettings) -> None:
    """Take the output format from the command line, the environment or the settings, in this order."""
    if not args.output_format and not os.environ.get(VARIABLE):
        wanted = settings.output_format
        args.output_format = wanted and known_output_format(wanted, f" in {settings.source}")
    args.output_format = output_format(args)


def _listed(options: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for option in options or () for word in option.split(",") if word.strip())


# Output


def _print_report(
    args: argparse.Namespace, report: CheckReport, fixed: int = 0, texts: dict[str, str] | None = None
) -> int:
    """Print the report and return the exit code."""
    # With stdin and --fix, stdout is for the fixed text.
    stream = sys.stderr if texts is not None and args.fix else sys.stdout
    _warn(args, report)
    for_people = args.output_format in FOR_PEOPLE or (args.statistics and args.output_format == "github")
    missed, left = _missed(args, report), len(report.findings)
    has_all_passed = report.files_checked and not fixed and not missed
    if left or has_all_passed or not for_people:
        if args.statistics:
            from ampwise.report.printers.summary import render_statistics

            write(render_statistics(report.findings, args.output_format, wants_colour(stream)), stream)
        elif for_people and not left:
            write(paint(_all_passed(report), "ok", wants_colour(stream)) + "\n", stream)
        else:
            notes = [*report.notes, *report.limits]
            print_findings(
                report.findings, args.output_format, stream, texts=texts, notes=notes, unread=report.unreadable
            )
    if for_people:
        lines = ""
        if fixed and left:
            was, remain = "were" if fixed > 1 else "was", "remain" if left > 1 else "remains"
            lines = f"Of {fixed + left} findings, {fixed} {was} fixed and {left} {remain}.\n"
        elif fixed:
            lines = f"Found {fixed} finding{'s' if fixed > 1 else ''} ({fixed} fixed, 0 remaining).\n"
        if missed and report.files_checked:
            lines += f"{missed}.\n" if left or fixed else f"No findings, but {missed}.\n"
        write(lines, stream)
    return _exit_code(args, report, bool(left))


def _all_passed(report: CheckReport) -> str:
    """Say how much was looked at: without mixed precision, that nothing was found says little."""
    files = f"{report.files_checked} file{'s' if report.files_checked > 1 else ''}"
    return f"All checks passed: {files}, {report.mixed_precision or 'none'} with mixed precision."


def _missed(args: argparse.Namespace, report: CheckReport) -> str:
    if not report.unreadable and not report.partly:  # the usual case; saves an import
        return ""
    from ampwise.report.printers.summary import describe_unchecked

    missed = describe_unchecked(len(report.unreadable), len(report.partly))
    is_brief = report.limits and not args.verbose
    return f"{missed} (too many paths or too much code; -v lists them)" if is_brief else missed


def _exit_code(args: argparse.Namespace, report: CheckReport, found: bool) -> int:
    if report.unreadable or not (report.files_checked or report.excluded):
        return 2
    return 1 if found and not args.exit_zero else 0


def _warn(args: argparse.Namespace, report: CheckReport) -> None:
    """Print on stderr what could not be checked, and why; limits in one line, unless the result says it anyway."""
    flush(sys.stdout)  # keeps both streams in order in a combined log
    for error in report.unreadable:
        say("ampwise: {}: cannot check: {}", error.path, error.reason)
    for note in [*report.notes, *report.limits] if args.verbose else report.notes:
        say("ampwise: {}", note)
    if report.limits and not args.verbose and not args.diff and (args.add_noqa or args.output_format not in FOR_PEOPLE):
        say("ampwise: {}", _missed(args, report))


# Changes to files


def _fix_files(args: argparse.Namespace, report: CheckReport, task: CheckTask) -> tuple[int, list[str]]:
    """Write the fixed files; return how many findings were fixed, and why others were not."""
    from ampwise.check.atomic_write import write_script
    from ampwise.check.source.script import UnreadableFile
    from ampwise.check.verified_fixes import fix_findings

    repairs = fix_findings(report.findings, task, unsafe=args.unsafe_fixes)
    fixed, problems = 0, repairs.notes
    for path, change in repairs.files.items():
        try:
            write_script(change.before, change.text)
        except UnreadableFile as error:
            problems.append(f"{path}: {error.reason}")
        else:
            fixed += len(change.fixed)
    return fixed, problems


def _show_diff(args: argparse.Namespace, report: CheckReport, task: CheckTask) -> int:
    from ampwise.check.apply_edits import unified_diff
    from ampwise.check.verified_fixes import fix_findings

    repairs = fix_findings(report.findings, task, unsafe=args.unsafe_fixes)
    report.notes += repairs.notes
    changes = False
    for change in repairs.files.values():  # each in the encoding of its file, as `patch` needs it
        encoding = change.before.encoding
        data = unified_diff(change.before, change.text).encode(encoding, "backslashreplace")
        write_exact(data, sys.stdout, encoding)
        changes = changes or bool(data)
    _warn(args, report)
    if report.files_checked:
        result = f"would fix {repairs.count} finding{'s' if repairs.count != 1 else ''}"
        missed = _missed(args, report)
        say("ampwise: {}{}", result if changes else "nothing to fix", f", but {missed}" if missed else "")
    return _exit_code(args, report, changes)


def _add_noqa(args: argparse.Namespace, report: CheckReport) -> int:
    from ampwise.check.atomic_write import write_script
    from ampwise.check.noqa import add_noqa_comments
    from ampwise.check.source.script import UnreadableFile, read_script

    by_file: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_file.setdefault(finding.place.file or "", []).append(finding)
    added = 0
    for path, findings in by_file.items():
        try:
            script = read_script(path)
            write_script(script, add_noqa_comments(script, findings))
        except UnreadableFile as error:
            report.notes.append(f"{path}: {error.reason}")
        else:
            added += len(findings)
    _warn(args, report)
    say("Suppressed {} finding{} with comments.", added, "s" if added != 1 else "", stream=sys.stdout)
    return _exit_code(args, report, found=added < len(report.findings))


def _run_stdin(args: argparse.Namespace, choice: RuleSelection) -> int:
    """Check stdin; with --fix, write the fixed text to stdout."""
    from ampwise.check.files import is_excluded
    from ampwise.check.linter import CheckReport, check_text
    from ampwise.check.source.script import UnreadableFile, decode_source
    from ampwise.check.verified_fixes import fix_findings

    data = sys.stdin.buffer.read()
    path, fixes = args.stdin_filename or STDIN, args.fix and not args.diff
    if args.force_exclude and args.stdin_filename and is_excluded(path, choice.configs):
        if fixes:
            write_exact(data, sys.stdout)
        return 0
    try:
        text = decode_source(data, path)
    except UnreadableFile as error:
        if fixes:
            write_exact(data, sys.stdout)
        return _print_report(args, CheckReport(unreadable=[error]), texts={})
    report, task = check_text(text, path, choice)
    if args.diff:
        return _show_diff(args, report, task)
    fixed = 0
    if fixes:
        repairs = fix_findings(report.findings, task, unsafe=args.unsafe_fixes)
        change, fixed = repairs.files.get(path), repairs.count
        if change is not None:
            text = change.before.file_text(change.text)
            data = change.before.file_bytes(text)
            report, _ = check_text(text, path, choice)
        report.notes += repairs.notes
        write_exact(data, sys.stdout)
    return _print_report(args, report, fixed, texts={path: text})
