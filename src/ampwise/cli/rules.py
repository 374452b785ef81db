"""List the rules, by what they look at.

Rules that installed plugins bring are listed with ours.

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
INDENT = " " * 10  # a summary that has its own line starts below the name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the rules as a JSON array")


def run(args: argparse.Namespace) -> int:
    from ampwise.printers.terminal import wants_colour, write
    from ampwise.rules import registered

    entries = registered()
    if args.json:
        from ampwise.strict_json import dumps

        write(dumps([{**entry.rule.as_dict(), "room": entry.room} for entry in entries]), sys.stdout)
    else:
        # In a pipe a rule stays one line, for grep.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        write(table(entries, wants_colour(sys.stdout), width), sys.stdout)
    return 0


def table(entries: Sequence[RegisteredRule], colour: bool = False, width: int | None = None) -> str:
    """One line a rule, in columns, under the room it belongs to; two, where a line would not fit ``width``."""
    from ampwise.printers.terminal import NARROWEST, paint
    from ampwise.rules import by_room

    if not entries:
        return "No rules.\n"
    name_width = max(len(entry.rule.name) for entry in entries)
    widest = max(len(_line(entry, name_width, False)) for entry in entries)
    summary_width = None if width is None or widest <= width else max(width, NARROWEST)
    lines: list[str] = []
    for room, group in by_room(entries).items():
        lines += [
            paint(room, "bold", colour),
            *(_line(entry, name_width, colour, summary_width) for entry in group),
            "",
        ]
    hints = [f"{len(entries)} rule{'s' if len(entries) > 1 else ''}; `ampwise explain CODE` explains one."]
    if any(entry.rule.fixable for entry in entries):
        hints.append("[*] is mended by `ampwise check --fix`, [-] sometimes.")
    return "\n".join([*lines, *(paint(hint, "dim", colour) for hint in hints)]) + "\n"


def _line(entry: RegisteredRule, name_width: int, colour: bool, summary_width: int | None = None) -> str:
    """A rule in one line or, if the width for the summary is given, with the summary below."""
    from ampwise.printers.terminal import paint, printable

    rule = entry.rule
    severity = paint(f"{rule.severity:7}", rule.severity, colour)
    off = "" if rule.on_by_default else " (off by default)"
    head, summary = f"  {rule.code:6}  {rule.name:{name_width}}  {severity}", f"{printable(rule.summary)}{off}"
    head += f"  {MARKS[rule.fixable]}"
    if summary_width is None:
        return f"{head}  {summary}"
    below = textwrap.fill(summary, summary_width, initial_indent=INDENT, subsequent_indent=INDENT)
    return f"{head.rstrip()}\n{below}"
