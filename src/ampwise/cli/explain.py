"""Explain a rule: what it means, why it matters, and how to fix it.

RULE is a rule's code or name, in any case; `ampwise rules` lists them.

Examples:
  ampwise explain AMP701
  ampwise explain bf16-without-matrix-units
  ampwise explain AMP701 --json | jq -r .fix
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap

from ampwise.finding import Rule

__all__ = ["add_arguments", "run"]

WIDEST = 90  # longer lines of prose are hard to read
NARROWEST = 20  # COLUMNS may be set to nonsense such as 2
INDENT = "  "
FIXED_BY = {
    "always": "Fixed by `ampwise check --fix`.",
    "sometimes": "Sometimes fixed by `ampwise check --fix`.",
    "": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rule", metavar="RULE", help="the code or the name of a rule")
    parser.add_argument("--json", action="store_true", help="the rule as a JSON object")


def run(args: argparse.Namespace) -> int:
    from ampwise.finding.terminal import wants_colour, write
    from ampwise.rules import find_rule

    rule = find_rule(args.rule)
    if args.json:
        from ampwise.finding.strict_json import dumps

        write(dumps(rule.as_dict()), sys.stdout)
    else:
        write(page(rule, wants_colour(sys.stdout)), sys.stdout)
    return 0


def page(rule: Rule, colour: bool = False) -> str:
    """Return the explanation of a rule as text."""
    from ampwise.finding.terminal import paint

    off = "" if rule.on_by_default else ", off by default"
    title = f"{paint(rule.code, rule.severity, colour)} {paint(rule.name, 'bold', colour)} ({rule.severity}{off})"
    sections = {
        "Why": _prose(rule.why),
        "Fix": "\n".join(filter(None, [_prose(rule.fix), _prose(FIXED_BY[rule.fixable])])),
        "Bad": _code(rule.bad, colour),
        "Good": _code(rule.good, colour),
        "More": rule.url or "",
    }
    shown = [
        f"{paint(heading, 'bold', colour)}\n{textwrap.indent(text, INDENT)}"
        for heading, text in sections.items()
        if text
    ]
    return "\n\n".join([f"{title}\n{_prose(rule.summary)}", *shown]) + "\n"


def _prose(text: str) -> str:
    """Wrap paragraphs to the terminal; indented lines are kept as they are."""
    width = max(min(shutil.get_terminal_size().columns, WIDEST), NARROWEST) - len(INDENT)
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(part if "\n " in part else textwrap.fill(part, width) for part in paragraphs)


def _code(text: str, colour: bool) -> str:
    code = textwrap.dedent(text).strip("\n")
    return _highlighted(code) if colour else code


def _highlighted(code: str) -> str:
    """Return code coloured by rich, which is slow to import and loaded only for colour output."""
    import io

    from rich.console import Console
    from rich.syntax import Syntax

    language = "console" if code.startswith("$ ") else "python"
    text = Syntax(code, language, theme="ansi_dark", background_color="default").highlight(code)
    text.rstrip()
    buffer = io.StringIO()
    Console(file=buffer, force_terminal=True, color_system="standard", width=1000).print(text, end="")
    return buffer.getvalue()
