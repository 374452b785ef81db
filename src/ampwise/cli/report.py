"""Show what a run found, compare two runs, or list them.

RUN is the folder that `ampwise run` wrote; the run may have ended or still be going. Without RUN, it is the newest in
ampwise-runs. If RUN is a folder of several runs, they are listed, newest first. With OTHER, the two are compared:
findings that are gone or new, and numbers that changed from RUN to OTHER. The page is one self-contained HTML file;
nothing is sent anywhere. The exit code is 0, also if the run has findings, and 2 if it cannot be read or a page cannot
be written.

Examples:
  ampwise report
  ampwise report ampwise-runs
  ampwise report RUN -o page.html --open
  ampwise report RUN --json | jq -r '.findings[].message'
  ampwise report runs/before runs/after
  ampwise report runs/before runs/after -o comparison.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.cli import print_json
from ampwise.cli._arguments import RUNS
from ampwise.errors import BadInput
from ampwise.finding.terminal import console, printable, say, wants_colour, write

if TYPE_CHECKING:
    from ampwise.runs.reader import Run

GROUP = "Find bugs"
NO_PAGES = (".txt", ".md", ".json", ".log", ".pdf", ".csv")
OWN_PAGE = "report.html"  # in the record's folder, for --open without -o
MOST_LISTED = 100
OWN_COMPARISON = "comparison.html"  # in the folder of OTHER, for --open without -o


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("record", metavar="RUN", nargs="?", help=f"the folder of a run, or of several (default: the newest in {RUNS})")
    add("other", metavar="OTHER", nargs="?", help="the folder of a later run, to compare with RUN")
    add("more", nargs="*", help=argparse.SUPPRESS)  # for the error message about a third record
    add("--json", action="store_true", help="JSON, as `ampwise schema report`, `comparison` or `runs` describes it")
    add("-v", "--verbose", action="store_true", help="also print layers, times, and what was fine")
    add("-o", "--output", metavar="FILE", help="write the report as an HTML page instead of printing it")
    add(
        "--open",
        action="store_true",
        help=f"open the page in a browser (default: RUN/{OWN_PAGE}; with OTHER: OTHER/{OWN_COMPARISON})",
    )
    add("-f", "--force", action="store_true", help="overwrite a file that is not an earlier report")


def run(args: argparse.Namespace) -> int:
    """Write the report in the requested form; only that form is made."""
    from ampwise.finding.strict_json import dumps
    from ampwise.report.as_json import as_json
    from ampwise.report.comparison.comparison import Comparison
    from ampwise.report.comparison.comparison_text import comparison_text, sentence
    from ampwise.report.run_text import run_text
    from ampwise.report.verdict import verdict
    from ampwise.runs.layout import is_record, newest_record, records_in

    if args.more:
        raise BadInput(
            f"report: expected one record, or two to compare, got {2 + len(args.more)}. Compare two at a time."
        )
    if args.record is None:
        newest = newest_record(Path(RUNS))
        if newest is None:
            raise BadInput(
                f"report: there are no runs in {RUNS}. `ampwise run train.py` makes one; or name its folder."
            )
        args.record = str(newest)
        say("ampwise: {} is the newest run", newest)
    runs = (
        []
        if not args.record or args.other is not None or is_record(Path(args.record))
        else records_in(Path(args.record))
    )
    if runs:
        return _list(args, runs)
    record = _read(args.record, args.other)
    other = None if args.other is None else _read(args.other, args.record)
    compared = None if other is None else Comparison.of(record, other)
    page_path = _write_page(args, record, other)
    if args.json:
        write(as_json(record) if compared is None else dumps(compared.as_dict()), sys.stdout)
    elif page_path is not None:
        result = f"{verdict(record)}." if compared is None else sentence(compared.verdict)
        say("{}\nWrote {}", result, page_path, stream=sys.stdout)
    elif compared is None:
        text = run_text(record, colour=wants_colour(sys.stdout), width=console().width, verbose=args.verbose)
        write(text, sys.stdout)
    else:
        write(comparison_text(compared, colour=wants_colour(sys.stdout), width=console().width), sys.stdout)
    if args.open and page_path is not None:
        from ampwise.hardware.programs import open_in_browser

        if not open_in_browser(page_path.resolve().as_uri()):
            raise BadInput(f"--open: no browser found. Open {page_path} yourself.")
    return 0


def _list(args: argparse.Namespace, records: list[Path]) -> int:
    """List the runs in a folder, newest first, a line each."""
    from ampwise.report.formatting import format_time
    from ampwise.report.result_view import ResultTable, print_parts
    from ampwise.report.run_facts import steps_of
    from ampwise.report.verdict import worst_first
    from ampwise.runs.reader import Run

    if args.output is not None or args.open:
        raise BadInput(f"report {args.record}: it has {len(records)} runs. Name one for a page, such as {records[0]}.")
    rows: list[dict[str, Any]] = []
    for folder in records[:MOST_LISTED]:
        try:
            run = Run.read(folder, layers_of_others=False)
        except BadInput as error:  # e.g. written by a later version
            rows.append({"run": str(folder), "status": str(error)})
            continue
        findings = [each.finding.rule for each in worst_first(run.merged_findings())]
        about = {name: run.manifest.get(name) for name in ("created", "script")}
        worst = f"{findings[0].code} {findings[0].name}" if findings else None
        counts = {"steps": steps_of(run), "findings": len(findings), "worst": worst}
        rows.append({"run": str(folder), **about, "status": run.status, **counts})
    if args.json:
        print_json({"runs": rows})
        return 0
    # The name in this folder; most begin with that of the script.
    headings = ("run", "started (UTC)", "steps", "ended", "worst finding")
    times = [format_time(str(row.get("created") or ""))[:16] for row in rows]  # to the minute
    in_one_year = len({time[:4] for time in times}) == 1
    lines = []
    for folder, row, started in zip(records, rows, times, strict=False):
        more = f" +{row['findings'] - 1}" if row.get("findings", 0) > 1 else ""
        worst = f"{row['worst']}{more}" if row.get("worst") else "none" if "worst" in row else ""
        name = folder.relative_to(args.record) if folder.is_relative_to(args.record) else folder
        cells = (name, started[5:] if in_one_year else started, row.get("steps", ""), row["status"], worst)
        lines.append([str(cell) for cell in cells])
    print_parts([ResultTable(headings=headings, rows=lines, left=range(len(headings)))])
    left_out = len(records) - len(rows)
    older = f" {left_out:,} older ones are not listed." if left_out else ""
    say("`ampwise report {}` shows one.{}", records[0], older, stream=sys.stdout)
    return 0


def _write_page(args: argparse.Namespace, record: Run, other: Run | None) -> Path | None:
    """Write the page and return its path; None if none was asked for."""
    if args.output is None and not args.open:
        return None
    from ampwise.report.page import comparison_page, page  # slow to import
    from ampwise.report.page.page_file import write_page

    path = record.folder / OWN_PAGE if other is None else other.folder / OWN_COMPARISON
    if args.output is not None:
        path = Path(args.output)
        if path.suffix.lower() in NO_PAGES:
            raise BadInput(
                f"-o {printable(args.output)}: -o writes an HTML page, such as page.html. For text or JSON, redirect "
                "what `ampwise report RUN` or `ampwise report RUN --json` prints."
            )
    elif path.is_symlink():  # a record may come from anybody
        raise BadInput(f"--open: {printable(str(path))} is a symlink and is not written to. Name another file with -o.")
    make = (lambda: page(record)) if other is None else (lambda: comparison_page(record, other))
    write_page(make, path, force=args.force)
    return path


def _read(name: str, other: str | None) -> Run:
    """Read the record in a folder; the error for another kind of folder says what it seems to be."""
    from ampwise.runs.layout import is_record, why_not_a_record
    from ampwise.runs.reader import Run

    if not name:
        raise BadInput("report: the name of the record is empty. Name its folder; `.` is the current one.")
    try:
        return Run.read(Path(name), layers_of_others=False)
    except BadInput as error:
        is_alone = other is not None and is_record(Path(other))
        alone = f"`ampwise report {other}` shows the other one." if is_alone else ""
        raise BadInput(" ".join(filter(None, [str(error), why_not_a_record(Path(name)), alone]))) from error
