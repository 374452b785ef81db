"""List the rules, grouped by what they check.

Rules of installed plugins are included.

Examples:
  ampwise rules
  ampwise rules | grep bf16
  ampwise rules --json | jq -r '.[].name'
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.rules import RegisteredRule

__all__ = ["add_arguments", "run"]

MARKS = {"always": "[*]", "sometimes": "[-]", "": "   "}
INDENT = " " * 10  # aligns a summary on its own line with the name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the rules as a JSON array")


def run(args: argparse.Namespace) -> int:
    from ampwise.finding.terminal import wants_colour, write
    from ampwise.rules import registered

    entries = registered()
    if args.json:
        from ampwise.finding.strict_json import dumps

        write(dumps([{**entry.rule.as_dict(), "category": entry.category} for entry in entries]), sys.stdout)
    else:
        # In a pipe each rule is one line, for grep.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        write(table(entries, wants_colour(sys.stdout), width), sys.stdout)
    return 0


def table(entries: Sequence[RegisteredRule], colour: bool = False, width: int | None = None) -> str:
    """Return the rules in columns under their category: a line each, or two if a line would not fit ``width``."""
    from ampwise.finding.terminal import NARROWEST, paint
    from ampwise.rules import by_category

    if not entries:
        return "No rules.\n"
    name_width = max(len(entry.rule.name) for entry in entries)
    widest = max(len(_line(entry, name_width, False)) for entry in entries)
    summary_width = None if width is None or widest <= width else max(width, NARROWEST)
    lines: list[str] = []
    for category, group in by_category(entries).items():
        lines += [
            paint(category, "bold", colour),
            *(_line(entry, name_width, colour, summary_width) for entry in group),
            "",
        ]
    hints = [f"{len(entries)} rule{'s' if len(entries) > 1 else ''}; `ampwise explain CODE` explains one."]
    if any(entry.rule.fixable for entry in entries):
        hints.append("[*] is fixed by `ampwise check --fix`, [-] sometimes.")
    return "\n".join([*lines, *(paint(hint, "dim", colour) for hint in hints)]) + "\n"


def _line(entry: RegisteredRule, name_width: int, colour: bool, summary_width: int | None = None) -> str:
    """Return a rule in one line or, if ``summary_width`` is given, with the summary on lines below."""
    from ampwise.finding.terminal import paint, printable

    rule = entry.rule
    severity = paint(f"{rule.severity:7}", rule.severity, colour)
    off = "" if rule.on_by_default else " (off by default)"
    head, summary = f"  {rule.code:6}  {rule.name:{name_width}}  {severity}", f"{printable(rule.summary)}{off}"
    head += f"  {MARKS[rule.fixable]}"
    if summary_width is None:
        return f"{head}  {summary}"
    below = textwrap.fill(summary, summary_width, initial_indent=INDENT, subsequent_indent=INDENT)
    return f"{head.rstrip()}\n{below}"
