"""Explain a rule, or list the rules.

With the code or the name of a rule: what it means, why it matters, how to fix it, and which commands find it. With
another word: the rules that mention it. Without arguments: all rules, those of installed plugins included.

Examples:
  ampwise explain AMP101
  ampwise explain clip-scaled-grads
  ampwise explain clip
  ampwise explain
  ampwise explain AMP101 --json | jq -r .fix
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence

from ampwise.errors import UnknownName
from ampwise.finding import Rule

__all__ = ["add_arguments", "run"]

WIDEST = 90  # longer lines of prose are hard to read
NARROWEST = 20  # COLUMNS may be set to nonsense such as 2
INDENT = "  "
MARKS = {"always": "[*]", "sometimes": "[-]", "": "   "}
FIXED_BY = {
    "always": "Fixed by `ampwise check --fix`.",
    "sometimes": "Sometimes fixed by `ampwise check --fix`.",
    "": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rule", metavar="RULE", nargs="*", help="the code or the name of a rule, or words to search")
    parser.add_argument("--json", action="store_true", help="one rule as a JSON object, several as an array")


def run(args: argparse.Namespace) -> int:
    from ampwise.finding.strict_json import dumps
    from ampwise.finding.terminal import wants_colour, write
    from ampwise.rules import all_rules, find_rule, found_by

    names = [name for word in args.rule for name in word.replace(",", " ").split()]
    try:
        found = [find_rule(name) for name in names] or all_rules()
    except UnknownName:
        found = search(" ".join(names), all_rules())
        if not found:
            raise
    if len(found) == 1:
        (rule,) = found
        data = {**rule.as_dict(), "found_by": found_by(rule)}
        write(dumps(data) if args.json else page(rule, wants_colour(sys.stdout)), sys.stdout)
    elif args.json:
        write(dumps([rule.as_dict() for rule in found]), sys.stdout)
    else:
        # In a pipe each rule is one line, for grep.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        write(table(found, wants_colour(sys.stdout), width), sys.stdout)
    return 0


def search(words: str, rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules whose name or summary contains all of the words; if there are none, those whose texts do."""
    wanted = words.lower().split()
    for text_of in (lambda rule: (rule.code, rule.name, rule.summary), lambda rule: (rule.why, rule.fix)):
        found = [rule for rule in rules if all(word in " ".join(text_of(rule)).lower() for word in wanted)]
        if found and wanted:
            return found
    return []


def table(rules: Sequence[Rule], colour: bool = False, width: int | None = None) -> str:
    """Return the rules in columns under the titles of their groups: a line each, or two if one would not fit."""
    from ampwise.finding import terminal
    from ampwise.rules import rule_groups

    def line(rule: Rule, colour: bool) -> tuple[str, str]:
        severity = terminal.paint(f"{rule.severity:7}", rule.severity, colour)
        off = "" if rule.on_by_default else " (off by default)"
        head = f"  {rule.code:6}  {rule.name:{name_width}}  {severity}  {MARKS[rule.fixable]}"
        return head, f"{terminal.printable(rule.summary)}{off}"

    name_width = max(len(rule.name) for rule in rules)
    fits = width is None or max(len("  ".join(line(rule, False))) for rule in rules) <= width
    lines: list[str] = []
    for title, group in rule_groups(rules).items():
        lines.append(terminal.paint(title, "bold", colour))
        for head, summary in (line(rule, colour) for rule in group):
            if fits or width is None:
                lines.append(f"{head}  {summary}")
            else:
                below = textwrap.fill(
                    summary, max(width, terminal.NARROWEST), initial_indent=" " * 10, subsequent_indent=" " * 10
                )
                lines += [head.rstrip(), below]
        lines.append("")
    hints = [f"{len(rules)} rule{'s' if len(rules) > 1 else ''}; `ampwise explain CODE` explains one."]
    if any(rule.fixable for rule in rules):
        hints.append("[*] is fixed by `ampwise check --fix`, [-] sometimes.")
    return "\n".join([*lines, *(terminal.paint(hint, "dim", colour) for hint in hints)]) + "\n"


def page(rule: Rule, colour: bool = False) -> str:
    """Return the explanation of a rule as text."""
    from ampwise.finding.terminal import paint
    from ampwise.rules import found_by

    off = "" if rule.on_by_default else ", off by default"
    title = f"{paint(rule.code, rule.severity, colour)} {paint(rule.name, 'bold', colour)} ({rule.severity}{off})"
    sections = {
        "Why": _prose(rule.why),
        "Fix": "\n".join(filter(None, [_prose(rule.fix), _prose(FIXED_BY[rule.fixable])])),
        "Bad": _code(rule.bad, colour),
        "Good": _code(rule.good, colour),
        "Found by": ", ".join(found_by(rule)),
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
