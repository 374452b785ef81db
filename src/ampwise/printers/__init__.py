"""Findings in, text out.

Every output is a module of ``ampwise.printers.outputs`` with one function,
``render(findings, *, colour=False, texts=None) -> str``; the list of outputs is the list of files. ``texts`` are
the contents of files that are not on disk, such as what came from stdin, by name. No output imports rich: a linter
that prints two lines should not pay for a terminal library.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

from ampwise.errors import UnknownName
from ampwise.modules import module_names
from ampwise.printers import outputs
from ampwise.printers.terminal import wants_colour, write

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    import argparse
    from typing import Any, Protocol, TextIO

    from ampwise.finding import Finding

    class Output(Protocol):
        """What a module in ``outputs`` is."""

        def render(
            self,
            findings: Sequence[Finding],
            *,
            colour: bool = False,
            texts: Mapping[str, str] | None = None,
            **further: Any,  # notes, for JSON
        ) -> str: ...


__all__ = ["add_output_arguments", "output_format", "output_formats", "print_findings"]

VARIABLE = "AMPWISE_OUTPUT_FORMAT"
DEFAULT = "full"


def print_findings(
    findings: Sequence[Finding],
    output_format: str = DEFAULT,
    file: TextIO | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write findings in one of the formats; colour only where ``file`` (else stdout) is a terminal.

    ``texts`` are the contents of files that are not on disk, by the name findings have for them. ``notes`` say what
    was not checked; only JSON has a place for them.
    """
    stream = sys.stdout if file is None else file
    further = {"notes": notes} if output_format == "json" and notes else {}
    write(_output(output_format).render(findings, colour=wants_colour(stream), texts=texts, **further), stream)


def output_formats() -> list[str]:
    """The formats there are, by scanning the folder.

    >>> output_formats()
    ['concise', 'full', 'github', 'gitlab', 'json', 'sarif']
    """
    return module_names(outputs.__path__)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a verb ``--output-format`` and ``--json``; ``output_format(args)`` reads them."""
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
    """The format to print in: the flag, else the variable, else what suits the place we run in."""
    if args.output_format:
        return str(args.output_format)
    if asked := environment.get(VARIABLE):
        return _known(asked, f" in {VARIABLE}")
    return "github" if environment.get("GITHUB_ACTIONS") == "true" else DEFAULT


def _output(name: str) -> Output:
    module: Any = importlib.import_module(f"{outputs.__name__}.{_known(name)}")
    found: Output = module
    return found


def _known(name: str, where: str = "") -> str:
    if name not in output_formats():
        listing = f"The formats are {', '.join(output_formats())}."
        raise UnknownName(f"output format{where}", name, output_formats(), listing=listing)
    return name
