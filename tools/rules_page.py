"""docs/rules: a page for each rule, and an index."""

from __future__ import annotations

from collections.abc import Sequence

from tools.markdown import NOTICE, Pages, page, plain, table

from ampwise.cli.explain import FIXED_BY
from ampwise.finding import Rule
from ampwise.finding.registry import found_by, rule_groups

__all__ = ["RULES_FOLDER", "rule_pages"]

RULES_FOLDER = "docs/rules"
INDEX_COLUMNS = ("code", "name", "severity", "fixed by `--fix`", "what it finds")


def rule_pages(rules: Sequence[Rule]) -> Pages:
    pages = {f"{RULES_FOLDER}/{_file_name(rule)}": _rule_page(rule) for rule in rules}
    return {f"{RULES_FOLDER}/index.md": _rule_index(rules), **pages}


def _rule_index(rules: Sequence[Rule]) -> str:
    parts = [NOTICE, "# Rules", "`ampwise explain CODE` shows a rule's page in a terminal."]
    for title, group in rule_groups(rules).items():
        rows = [
            (f"[{rule.code}]({_file_name(rule)})", f"`{rule.name}`", _severity(rule), rule.fixable, rule.summary)
            for rule in group
        ]
        heading, _, more = title.rstrip(".").partition(": ")
        parts += [f"## {heading}", *([f"{more[0].upper()}{more[1:]}."] if more else []), table(INDEX_COLUMNS, rows)]
    return page(parts)


def _rule_page(rule: Rule) -> str:
    by = ", ".join(f"`{each}`" for each in found_by(rule))
    return page(
        [
            NOTICE,
            f"# {rule.code} {rule.name}",
            " · ".join(filter(None, [f"**{_severity(rule)}**", by and f"found by {by}", "[all rules](index.md)"])),
            plain(rule.summary),
            "## Why",
            plain(rule.why),
            "## Fix",
            plain(rule.fix),
            *filter(None, [FIXED_BY[rule.fixable]]),
            "## Bad",
            _example(rule.bad),
            "## Good",
            _example(rule.good),
        ]
    )


def _file_name(rule: Rule) -> str:
    return f"{rule.code}-{rule.name}.md"


def _severity(rule: Rule) -> str:
    return str(rule.severity) if rule.on_by_default else f"{rule.severity}, off by default"


def _example(text: str) -> str:
    code = plain(text)
    return f"```{'console' if code.startswith('$ ') else 'python'}\n{code}\n```"
