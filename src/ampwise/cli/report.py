"""Read the record of a run, or compare two: in the terminal, as JSON, or as a page.

RUN is the folder that `ampwise run -o RUN` left, of a run that has ended or is still going. With OTHER,
the two are compared: what is gone, what is new, and which numbers have changed from RUN to OTHER. The
page is one HTML file that needs nothing else; nothing is sent anywhere. A record with findings is still
a record that could be read: the exit code is 0, and 2 when one cannot be read or a page cannot be written.

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

    from ampwise.record.reader import Run

__all__ = ["add_arguments", "run"]

OWN_PAGE = "report.html"  # in the record's folder, for --open without -o
OWN_COMPARISON = "comparison.html"  # likewise, in the folder of the later of two


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="RUN", help="the folder of a record")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="the folder of a later one, to compare it with RUN")
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)  # only to say that two are the most
    parser.add_argument("--json", action="store_true", help="the whole report as a JSON object")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the report as a page instead of printing it")
    parser.add_argument("--html", dest="output", help=argparse.SUPPRESS)  # what -o was called at first
    parser.add_argument(
        "--open",
        action="store_true",
        help=f"show the page in a browser (RUN/{OWN_PAGE} by default, OTHER/{OWN_COMPARISON} of two)",
    )
    parser.add_argument("-f", "--force", action="store_true", help="write over a file that is no earlier report")


def run(args: argparse.Namespace) -> int:
    from ampwise.errors import BadInput

    if args.more:
        raise BadInput(
            f"report takes one record, or two to compare, and was given {2 + len(args.more)}. Compare them by twos."
        )
    return _report(args) if args.other is None else _compare(args)


def _report(args: argparse.Namespace) -> int:
    from ampwise.report.as_json import as_json
    from ampwise.report.summary import summary
    from ampwise.report.verdict import verdict

    record = _read(args.record)

    def drawn() -> str:
        from ampwise.report.page import page  # slow to import

        return page(record)

    return _give(
        args,
        record.folder / OWN_PAGE,
        page=drawn,
        told=lambda width, colour: summary(record, colour=colour, width=width),
        verdict=lambda: f"{verdict(record)}.",
        as_json=lambda: as_json(record),
    )


def _compare(args: argparse.Namespace) -> int:
    from ampwise.report.comparison.comparison import Comparison
    from ampwise.report.comparison.text import comparison_text, sentence
    from ampwise.strict_json import dumps

    before, after = _read(args.record, other=args.other), _read(args.other, other=args.record)
    compared = Comparison.of(before, after)

    def drawn() -> str:
        from ampwise.report.page import comparison_page  # slow to import

        return comparison_page(before, after)

    return _give(
        args,
        after.folder / OWN_COMPARISON,
        page=drawn,
        told=lambda width, colour: comparison_text(compared, colour=colour, width=width),
        verdict=lambda: sentence(compared.verdict),
        as_json=lambda: dumps(compared.as_dict()),
    )


def _give(
    args: argparse.Namespace,
    own_page: Path,
    *,
    page: Callable[[], str],
    told: Callable[[int, bool], str],
    verdict: Callable[[], str],
    as_json: Callable[[], str],
) -> int:
    """The report in the form that was asked for; each is made only then."""
    from pathlib import Path

    from ampwise.errors import BadInput
    from ampwise.printers.terminal import console, printable, say, wants_colour, write
    from ampwise.report.page.writing import write_page

    paper = Path(args.output) if args.output is not None else own_page if args.open else None
    if args.output is None and paper is not None and paper.is_symlink():  # a record may come from anybody
        raise BadInput(f"--open {printable(str(paper))}: it is a symlink, and no page is written through one. Give -o.")
    if paper is not None:
        write_page(page, paper, "-o", force=args.force)
    if args.json:
        write(as_json(), sys.stdout)
    elif paper is not None:
        say("{}\nThe page is {}", verdict(), paper, stream=sys.stdout)
    else:
        write(told(console().width, wants_colour(sys.stdout)), sys.stdout)
    if args.open and paper is not None:
        _show(paper)
    return 0


# --- pages ---------------------------------------------------------------------------------------------------------


def _show(paper: Path) -> None:
    from ampwise.errors import BadInput
    from ampwise.programs import open_in_browser

    if not open_in_browser(paper.resolve().as_uri()):
        raise BadInput(f"--open: no browser was found here. Open {paper} yourself.")


# --- records -------------------------------------------------------------------------------------------------------


def _read(name: str, other: str | None = None) -> Run:
    """The record in a folder; where there is none, what it is instead, as far as names tell."""
    from pathlib import Path

    from ampwise.errors import BadInput
    from ampwise.record.hints import why_not_a_record
    from ampwise.record.reader import Run

    if not name:
        raise BadInput("report: the name of the record is empty. Name its folder; `.` is the one you are in.")
    try:
        return Run.read(Path(name), layers_of_others=False)
    except BadInput as error:
        alone = "" if other is None else f"`ampwise report {other}` shows the other one."
        told = [str(error), why_not_a_record(Path(name)), alone]
        raise BadInput(" ".join(part for part in told if part)) from error
