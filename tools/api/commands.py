"""The commands of the command line with their options, and the exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ampwise.cli import INTERRUPTED, READER_GONE, build_parser, commands

__all__ = ["command_lines"]


def command_lines() -> Iterator[str]:
    yield "exit codes: 0 clean, 1 findings or a no, 2 could not do what was asked, " + (
        f"{INTERRUPTED} interrupted, {READER_GONE} the reader has gone; of `run`, the script's own"
    )
    for name in commands():
        choices = next(a for a in build_parser([name])._actions if isinstance(a, argparse._SubParsersAction)).choices
        yield f"ampwise {name}"
        actions = [action for action in choices[name]._actions if action.help != argparse.SUPPRESS]
        yield from sorted(f"    {_line(action)}" for action in actions)


def _line(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    values = "" if action.choices is None else " {" + ",".join(map(str, action.choices)) + "}"
    many = {None: "", 0: "", "?": " [one]", "*": " [any]", "+": " [some]", argparse.REMAINDER: " [the rest]"}
    takes = " VALUE" if action.option_strings and action.nargs != 0 and not values else ""
    needed = " required" if action.option_strings and action.required else ""
    return f"{name}{takes}{values}{many.get(action.nargs, f' [{action.nargs}]')}{needed}"
