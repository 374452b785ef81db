"""Show the record of a run, or compare two: in the terminal, as JSON, or as an HTML page.

RUN is the folder that `ampwise run -o RUN` wrote; the run may have ended or still be going. With OTHER, the
two are compared: findings that are gone or new, and numbers that changed from RUN to OTHER. The page is one
self-contained HTML file; nothing is sent anywhere. The exit code is 0, also if the record has findings, and
2 if a record cannot be read or a page cannot be written.

Examples:
  ampwise report RUN
  ampwise report RUN -o page.html --open
  ampwise report RUN --json | jq -r '.findings[].message'
  ampwise report runs/before runs/after
  ampwise report runs/before runs/after -o comparison.html
"""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ampwise.runs.reader import Run

__all__ = ["add_arguments", "run"]

OWN_PAGE = "report.html"  # in the record's folder, for --open without -o
OWN_COMPARISON = "comparison.html"  # in the folder of OTHER, for --open without -o


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="RUN", help="the folder of a record")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="the folder of a later record, to compare with RUN")
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)  # for the error message about a third record
    parser.add_argument("--json", action="store_true", help="the whole report as a JSON object")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the report as an HTML page instead of printing it"
    )
    parser.add_argument("--html", dest="output", help=argparse.SUPPRESS)  # an earlier name of -o
    parser.add_argument(
        "--open",
        action="store_true",
        help=f"open the page in a browser (default: RUN/{OWN_PAGE}; with OTHER: OTHER/{OWN_COMPARISON})",
    )
    parser.add_argument("-f", "--force", action="store_true", help="overwrite a file that is not an earlier report")


def run(args: argparse.Namespace) -> int:
    from ampwise.errors import BadInput

    if args.more:
        raise BadInput(
            f"report: expected one record, or two to compare, got {2 + len(args.more)}. Compare two at a time."
        )
    return _report(args) if args.other is None else _compare(args)


def _report(args: argparse.Namespace) -> int:
    from ampwise.report.as_json import as_json
    from ampwise.report.run_text import run_text
    from ampwise.report.verdict import verdict

    record = _read(args.record)

    def make_page() -> str:
        from ampwise.report.page import page  # slow to import

        return page(record)

    return _output(
        args,
        record.folder / OWN_PAGE,
        page=make_page,
        text=lambda width, colour: run_text(record, colour=colour, width=width),
        verdict=lambda: f"{verdict(record)}.",
        as_json=lambda: as_json(record),
    )


def _compare(args: argparse.Namespace) -> int:
    from ampwise.finding.strict_json import dumps
    from ampwise.report.comparison.comparison import Comparison
    from ampwise.report.comparison.comparison_text import comparison_text, sentence

    before, after = _read(args.record, other=args.other), _read(args.other, other=args.record)
    compared = Comparison.of(before, after)

    def make_page() -> str:
        from ampwise.report.page import comparison_page  # slow to import

        return comparison_page(before, after)

    return _output(
        args,
        after.folder / OWN_COMPARISON,
        page=make_page,
        text=lambda width, colour: comparison_text(compared, colour=colour, width=width),
        verdict=lambda: sentence(compared.verdict),
        as_json=lambda: dumps(compared.as_dict()),
    )


def _output(
    args: argparse.Namespace,
    own_page: Path,
    *,
    page: Callable[[], str],
    text: Callable[[int, bool], str],
    verdict: Callable[[], str],
    as_json: Callable[[], str],
) -> int:
    """Write the report in the requested form; only that form is made."""
    from pathlib import Path

    from ampwise.errors import BadInput
    from ampwise.finding.terminal import console, printable, say, wants_colour, write
    from ampwise.report.page.page_file import write_page

    page_path = Path(args.output) if args.output is not None else own_page if args.open else None
    if args.output is None and page_path is not None and page_path.is_symlink():  # a record may come from anybody
        raise BadInput(
            f"--open: {printable(str(page_path))} is a symlink and is not written to. Name another file with -o."
        )
    if page_path is not None:
        write_page(page, page_path, "-o", force=args.force)
    if args.json:
        write(as_json(), sys.stdout)
    elif page_path is not None:
        say("{}\nWrote {}", verdict(), page_path, stream=sys.stdout)
    else:
        write(text(console().width, wants_colour(sys.stdout)), sys.stdout)
    if args.open and page_path is not None:
        _show(page_path)
    return 0


# --- pages ---------------------------------------------------------------------------------------------------------


def _show(page_path: Path) -> None:
    from ampwise.errors import BadInput
    from ampwise.hardware.programs import open_in_browser

    if not open_in_browser(page_path.resolve().as_uri()):
        raise BadInput(f"--open: no browser found. Open {page_path} yourself.")


# --- records -------------------------------------------------------------------------------------------------------


def _read(name: str, other: str | None = None) -> Run:
    """Read the record in a folder; the error for another kind of folder says what it seems to be."""
    from pathlib import Path

    from ampwise.errors import BadInput
    from ampwise.runs.find import why_not_a_record
    from ampwise.runs.reader import Run

    if not name:
        raise BadInput("report: the name of the record is empty. Name its folder; `.` is the current one.")
    try:
        return Run.read(Path(name), layers_of_others=False)
    except BadInput as error:
        alone = "" if other is None else f"`ampwise report {other}` shows the other one."
        parts = [str(error), why_not_a_record(Path(name)), alone]
        raise BadInput(" ".join(part for part in parts if part)) from error
