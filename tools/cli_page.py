"""docs/cli.md: the help of each command, from its parser."""

from __future__ import annotations

import argparse
import textwrap

from tools.markdown import NOTICE, Pages, page, plain

from ampwise.cli import build_parser, commands

__all__ = ["cli_page"]


def cli_page() -> Pages:
    parts = [NOTICE, "# Command line", "Exit codes: 0 clean, 1 findings, 2 error."]
    for name in commands():
        parts += [f"## ampwise {name}", f"```text\n{_help(name)}\n```"]
    return {"docs/cli.md": page(parts)}


def _help(command: str) -> str:
    """Return a command's help. Not argparse's own text: that changes from one Python to the next."""
    parser = _command_parser(command)
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    arguments = [_argument(action, parser) for action in actions]
    width = min(28, max(len(name) for name, _ in arguments))
    listed = [_entry(name, text, width) for name, text in arguments]
    return "\n".join([plain(parser.description or ""), "", "Arguments:", *listed])


def _command_parser(command: str) -> argparse.ArgumentParser:
    subparsers = next(a for a in build_parser([command])._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = subparsers.choices[command]
    return parser


def _argument(action: argparse.Action, parser: argparse.ArgumentParser) -> tuple[str, str]:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    value = "" if action.nargs == 0 else _value(action)
    return " ".join(filter(None, [", ".join(action.option_strings), value])), text


def _value(action: argparse.Action) -> str:
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
    name = action.metavar if isinstance(action.metavar, str) else choices or action.dest.upper()
    return f"{name} ..." if action.nargs in ("*", "+", argparse.REMAINDER) else name


def _entry(name: str, text: str, width: int) -> str:
    lines = textwrap.wrap(" ".join(text.split()), 96 - width) or [""]
    first = [f"  {name}", f"  {'':{width}}  {lines[0]}"] if len(name) > width else [f"  {name:{width}}  {lines[0]}"]
    return "\n".join(line.rstrip() for line in [*first, *(f"  {'':{width}}  {line}" for line in lines[1:])])
