"""Read the record of a run: a summary in the terminal, JSON, or a page.

RUN is the folder that `ampwise run -o RUN` left, of a run that has ended or is still going. The page
is one HTML file without scripts; nothing is sent anywhere. A record with findings is still a record
that could be read: the exit code is 0, and 2 when RUN cannot be read or the page cannot be written.

Examples:
  ampwise report RUN
  ampwise report RUN --html page.html --open
  ampwise report RUN --json | jq -r '.findings[].message'
"""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from pathlib import Path

    from ampwise.record.reader import Run

__all__ = ["add_arguments", "run"]

OWN_PAGE = "report.html"  # in the record's folder, for --open without --html
HEAD = 2000  # characters of a file in which an earlier page of ours says what it is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="RUN", help="the folder of a record")
    parser.add_argument("--json", action="store_true", help="the whole report as a JSON object")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page instead of printing it")
    parser.add_argument("--open", action="store_true", help=f"show the page in a browser (RUN/{OWN_PAGE} by default)")
    parser.add_argument("-f", "--force", action="store_true", help="write over a file that is no earlier report")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from ampwise.printers.terminal import write
    from ampwise.record.reader import Run

    record = Run.read(Path(args.record))
    paper = Path(args.html) if args.html is not None else Path(args.record, OWN_PAGE) if args.open else None
    if paper is not None:
        _write_page(record, paper, force=args.force)
    if args.json:
        from ampwise.report.as_json import as_json

        write(as_json(record), sys.stdout)
    else:
        write(_told(record, paper), sys.stdout)
    if args.open and paper is not None:
        _show(paper)
    return 0


def _told(record: Run, paper: Path | None) -> str:
    from ampwise.printers.terminal import console, printable, wants_colour
    from ampwise.report.summary import summary
    from ampwise.report.verdict import verdict

    if paper is not None:
        return f"{printable(verdict(record))}.\nThe page is {printable(str(paper))}\n"
    return summary(record, colour=wants_colour(sys.stdout), width=console().width)


def _write_page(record: Run, paper: Path, *, force: bool) -> None:
    from ampwise.errors import BadInput
    from ampwise.report.page import page

    if paper.is_dir():
        raise BadInput(f"--html {paper}: a folder; name a file, such as {paper / 'page.html'}.")
    if paper.is_file() and not force and not _is_ours(paper):
        raise BadInput(f"--html {paper}: exists and is no earlier report; -f writes over it, or name another file.")
    try:
        paper.write_text(page(record), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--html {paper}: cannot be written: {error.strerror or error}. Name another file.") from error


def _is_ours(paper: Path) -> bool:
    from ampwise.report.page import MARK

    try:
        with paper.open(encoding="utf-8", errors="replace") as file:
            head = file.read(HEAD)
    except OSError:
        return False
    return not head or MARK in head  # an empty file holds nothing to lose


def _show(paper: Path) -> None:
    import webbrowser

    from ampwise.errors import BadInput

    if not webbrowser.open(paper.resolve().as_uri()):
        raise BadInput(f"--open: no browser was found here. Open {paper} yourself.")
