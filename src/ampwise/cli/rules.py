"""List the rules, by what they look at.

Rules that installed plugins bring are listed with ours.

Examples:
  ampwise rules
  ampwise rules | grep bf16
  ampwise rules --json | jq -r '.[].name'
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.rules import RegisteredRule

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the rules as a JSON array")


def run(args: argparse.Namespace) -> int:
    from ampwise.printers.terminal import wants_colour, write
    from ampwise.rules import registered

    entries = registered()
    if args.json:
        from ampwise.printers.strict_json import dumps

        write(dumps([{**entry.rule.as_dict(), "room": entry.room} for entry in entries]), sys.stdout)
    else:
        write(table(entries, wants_colour(sys.stdout)), sys.stdout)
    return 0


def table(entries: Sequence[RegisteredRule], colour: bool = False) -> str:
    """One line a rule, in columns, under the room it belongs to."""
    from ampwise.printers.terminal import paint
    from ampwise.rules import by_room

    if not entries:
        return "No rules.\n"
    width = max(len(entry.rule.name) for entry in entries)
    lines: list[str] = []
    for room, group in by_room(entries).items():
        lines += [paint(room, "bold", colour), *(_line(entry, width, colour) for entry in group), ""]
    hint = f"{len(entries)} rule{'s' if len(entries) > 1 else ''}; `ampwise explain CODE` explains one."
    return "\n".join([*lines, paint(hint, "dim", colour)]) + "\n"


def _line(entry: RegisteredRule, width: int, colour: bool) -> str:
    from ampwise.printers.terminal import paint, printable

    rule = entry.rule
    severity = paint(f"{rule.severity:7}", rule.severity, colour)
    off = "" if rule.on_by_default else " (off by default)"
    return f"  {rule.code:6}  {rule.name:{width}}  {severity}  {printable(rule.summary)}{off}"
