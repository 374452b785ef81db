"""Explain a rule, or list all rules.

With the code or the name of a rule: what it means, why it matters, how to fix it, and which commands find it. With
another word: the rules that mention it. Without arguments: all rules, those of installed plugins included.

Examples:
  ampwise explain AMP101
  ampwise explain clip-scaled-grads
  ampwise explain clip
  ampwise explain
  ampwise explain AMP101 --json | jq -r '.[0].fix'
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence

from ampwise.cli import print_json
from ampwise.errors import UnknownName
from ampwise.finding import Rule, terminal
from ampwise.finding.terminal import paint, wants_colour, write

GROUP = "Find bugs"
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
    parser.add_argument("--json", action="store_true", help="JSON, as `ampwise schema explain` describes it")


def run(args: argparse.Namespace) -> int:
    from ampwise.finding.registry import all_rules, find_rule, found_by

    names = [name for word in args.rule for name in word.replace(",", " ").split()]
    try:
        found = [find_rule(name) for name in names] or all_rules()
    except UnknownName:
        found = search(" ".join(names), all_rules())
        if not found:
            raise
    if args.json:
        print_json([{**rule.as_dict(), "found_by": found_by(rule)} for rule in found])
    elif len(found) == 1:
        write(page(found[0], wants_colour(sys.stdout)), sys.stdout)
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
    from ampwise.finding.registry import rule_groups

    def line(rule: Rule, colour: bool) -> tuple[str, str]:
        severity = paint(f"{rule.severity.word:7}", rule.severity, colour)
        off = "" if rule.on_by_default else " (off by default)"
        head = f"  {rule.code:6}  {rule.name:{name_width}}  {severity}  {MARKS[rule.fixable]}"
        return head, f"{terminal.printable(rule.summary)}{off}"

    name_width = max(len(rule.name) for rule in rules)
    fits = width is None or max(len("  ".join(line(rule, False))) for rule in rules) <= width
    below = textwrap.TextWrapper(
        max(width or 0, terminal.NARROWEST), initial_indent=" " * 10, subsequent_indent=" " * 10
    )
    lines: list[str] = []
    for title, group in rule_groups(rules).items():
        lines.append(paint(title, "bold", colour))
        for head, summary in (line(rule, colour) for rule in group):
            lines += [f"{head}  {summary}"] if fits else [head.rstrip(), below.fill(summary)]
        lines.append("")
    hints = [f"{len(rules)} rule{'s' if len(rules) > 1 else ''}; `ampwise explain CODE` explains one."]
    if any(rule.fixable for rule in rules):
        hints.append("[*] is fixed by `ampwise check --fix`, [-] sometimes.")
    return "\n".join([*lines, *(paint(hint, "dim", colour) for hint in hints)]) + "\n"


def page(rule: Rule, colour: bool = False) -> str:
    """Return the explanation of a rule as text, on one screen: what to do comes before why."""
    from ampwise.finding.registry import found_by

    off = "" if rule.on_by_default else ", off by default"
    title = f"{paint(rule.code, rule.severity, colour)} {paint(rule.name, 'bold', colour)} ({rule.severity.word}{off})"
    sections = {
        "Fix": "\n".join(filter(None, [_prose(rule.fix), FIXED_BY[rule.fixable]])),
        "Example": _changes(rule, colour),
        "Why": _prose(rule.why),
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


def _changes(rule: Rule, colour: bool) -> str:
    """Return the rule's example as a diff from the bad code to the good one."""
    from difflib import SequenceMatcher

    bad, good = (textwrap.dedent(text).strip("\n").split("\n") for text in (rule.bad, rule.good))
    lines = []
    for kind, start, end, then, until in SequenceMatcher(None, bad, good, autojunk=False).get_opcodes():
        if kind == "equal":
            lines += [f"  {line}".rstrip() for line in bad[start:end]]
        else:
            lines += [paint(f"- {line}".rstrip(), "removed", colour) for line in bad[start:end]]
            lines += [paint(f"+ {line}".rstrip(), "added", colour) for line in good[then:until]]
    return "\n".join(lines)
