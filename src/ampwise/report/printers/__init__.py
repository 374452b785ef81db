"""Print findings in one of several output formats.

Every output format is a module of ``ampwise.report.printers.outputs`` with one function,
``render(findings, *, colour=False, texts=None) -> str``; the formats are the files in that folder. ``texts`` are the
contents of files that are not on disk, such as stdin, by name. The formats for programs (PROGRAMS) also take
``unread``, the files that could not be checked; people are told on stderr. No output imports rich: a linter that prints
two lines should not load a terminal library.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

from ampwise.errors import UnknownName
from ampwise.finding.log import log_if_configured
from ampwise.finding.package_modules import module_names
from ampwise.finding.terminal import terminal_width, wants_colour, write
from ampwise.report.printers import outputs

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    import argparse
    from typing import Any, TextIO

    from ampwise.finding import Finding
    from ampwise.report.printers.unread import Unread

VARIABLE = "AMPWISE_OUTPUT_FORMAT"
DEFAULT = "full"
PROGRAMS = ("github", "gitlab", "json", "sarif")


def log_findings(findings: Sequence[Finding]) -> None:
    """Log findings from within a user's training: a stream that cannot be written does not stop it."""
    full: Any = importlib.import_module(f"{outputs.__name__}.{DEFAULT}")
    if not log_if_configured("warning", full.render(findings, colour=False, texts=None)) and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print_findings(findings, file=sys.stderr)


def print_findings(
    findings: Sequence[Finding],
    output_format: str = DEFAULT,
    file: TextIO | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    unread: Sequence[Unread] = (),
) -> None:
    """Write findings in one of the formats; in colour only if ``file`` (by default stdout) is a terminal.

    ``texts`` are the contents of files that are not on disk, by the names that findings use. ``notes`` say what was
    not checked in a file; only the JSON format contains them. ``unread`` are the files that were not checked at all.
    """
    stream = sys.stdout if file is None else file
    further: dict[str, Any] = {"notes": notes} if output_format == "json" and notes else {}
    if unread and output_format in PROGRAMS:
        further["unread"] = unread
    if output_format == "full":
        further["width"] = terminal_width(stream)
    output: Any = importlib.import_module(f"{outputs.__name__}.{known_output_format(output_format)}")
    write(output.render(findings, colour=wants_colour(stream), texts=texts, **further), stream)


def output_formats() -> list[str]:
    """Return the names of the output formats, one per file in the folder.

    >>> output_formats()
    ['concise', 'full', 'github', 'gitlab', 'json', 'sarif']
    """
    return module_names(outputs.__path__)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--output-format`` and ``--json`` to a command; ``output_format(args)`` reads them."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--output-format",
        metavar="FORMAT",
        choices=output_formats(),
        help=f"{', '.join(output_formats())}; default: {DEFAULT}, or github in GitHub Actions, or {VARIABLE}",
    )
    group.add_argument(
        "--json",
        dest="output_format",
        action="store_const",
        const="json",
        help="short for --output-format json",
    )


def output_format(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> str:
    """Return the format to print in: the option, else the environment variable, else the default here."""
    if args.output_format:
        return str(args.output_format)
    if asked := environment.get(VARIABLE):
        return known_output_format(asked, f" in {VARIABLE}")
    return "github" if environment.get("GITHUB_ACTIONS") == "true" else DEFAULT


def known_output_format(name: str, where: str = "") -> str:
    """Return the name if it is one of the output formats; else raise UnknownName."""
    if name not in output_formats():
        listing = f"The formats are {', '.join(output_formats())}."
        raise UnknownName(f"output format{where}", name, output_formats(), listing=listing)
    return name
