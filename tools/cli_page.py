"""docs/cli.md: the help of each command, from its parser."""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
from collections.abc import Iterator

from tools.markdown import NOTICE, Pages, page, plain, table

from ampwise import cli

__all__ = ["as_markdown", "cli_page"]

CODE = re.compile(r"(`[^`]+`)")
OPTION = re.compile(r"(?<![\w/.-])(--?[A-Za-z][\w-]*)")  # which a typographer would give a long dash
SPECIAL = re.compile(r"([\\*_<>\[\]{}$|])")
COLUMNS = re.compile(r"(\S.*?)\s{2,}(\S.*)")


def cli_page() -> Pages:
    order = getattr(cli, "ORDER", ())
    groups: dict[str, list[str]] = {}
    for name in sorted(cli.commands(), key=lambda name: order.index(name) if name in order else len(order)):
        groups.setdefault(getattr(_module(name), "GROUP", "More"), []).append(name)
    said = cli.summaries()
    parts = [NOTICE, "# Commands", "Exit codes: 0 clean, 1 findings, 2 error."]
    for group, names in groups.items():
        parts.append(table((group, ""), [(f"[{name}](#ampwise-{name})", as_markdown(said[name])) for name in names]))
    for name in itertools.chain(*groups.values()):
        parser = _command_parser(name)
        shown = [action for action in parser._actions if action.help not in (argparse.SUPPRESS, _HELP)]
        rows = [_option(action, parser) for action in shown]
        options = [table(("option", ""), rows)] if rows else []
        parts += [f"## ampwise {name}", as_markdown(plain(parser.description or "")), *options]
    return {"docs/cli.md": page(parts)}


_HELP = "show this help message and exit"


def _module(command: str) -> object:
    return importlib.import_module(f"ampwise.cli.{command}")


def _command_parser(command: str) -> argparse.ArgumentParser:
    subparsers = next(a for a in cli.build_parser([command])._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = subparsers.choices[command]
    return parser


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> tuple[str, str]:
    """Return a row of the table. Not argparse's own text: that changes from one Python to the next."""
    text = as_markdown((action.help or "") % {**vars(action), "prog": parser.prog})
    choices = [str(each) for each in action.choices or ()]
    if choices and not all(each in text for each in choices):
        text += f": {', '.join(f'`{each}`' for each in choices)}"
    value = "" if action.nargs == 0 else action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    more = " ..." if action.nargs in ("*", "+", argparse.REMAINDER) else ""
    return f"`{' '.join(filter(None, [', '.join(action.option_strings), value]))}{more}`", text


def as_markdown(text: str) -> str:
    """Return a help text as Markdown: indented lines are code or, if they have two columns, a table.

    >>> as_markdown("With --fix it writes *.py files.")
    'With `--fix` it writes \\\\*.py files.'
    """
    return "\n\n".join(_blocks(text))


def _blocks(text: str) -> Iterator[str]:
    before = ""
    for is_indented, lines in itertools.groupby(text.splitlines(), lambda line: line.startswith("  ") or None):
        if not is_indented:
            for paragraph in "\n".join(lines).strip("\n").split("\n\n"):
                before = " ".join(paragraph.split())
                if before:
                    yield _prose(before)
            continue
        inner = plain("\n".join(lines)).splitlines()
        pairs = [COLUMNS.fullmatch(line) for line in inner]
        if before.startswith("Examples"):
            yield "```console\n{}\n```".format("\n".join(f"$ {line}" for line in inner))
        elif len(inner) > 1 and all(pairs):
            yield table(("", ""), [(f"`{found[1]}`", _prose(found[2])) for found in pairs if found])
        else:
            language = "python" if inner[0].startswith("def ") else "text"
            yield "```{}\n{}\n```".format(language, "\n".join(inner))


def _prose(text: str) -> str:
    parts = CODE.split(text)
    return "".join(part if part.startswith("`") else OPTION.sub(r"`\1`", SPECIAL.sub(r"\\\1", part)) for part in parts)
