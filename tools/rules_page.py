"""docs/rules: a page for each rule, and an index."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from tools.markdown import NOTICE, Pages, page, plain, table

from ampwise.cli.explain import FIXED_BY
from ampwise.finding import Rule
from ampwise.finding.registry import found_by, rule_groups

__all__ = ["GUIDES", "RULES_FOLDER", "rule_pages"]

RULES_FOLDER = "docs/rules"
INDEX_COLUMNS = ("code", "what it finds", "name", "severity", "fixed by `--fix`")
# The page that treats a rule, by the start of its code; the longest start decides.
GUIDES = {
    "AMP1": ("Loss scaling", "../concepts/loss_scaling.md"),
    "AMP2": ("Loss scaling", "../concepts/loss_scaling.md"),
    "AMP204": ("Checkpoints", "../checkpoint.md"),
    "AMP207": ("Distributed", "../guides/distributed.md"),
    "AMP3": ("Formats", "../concepts/formats.md"),
    "AMP306": ("Memory that autocast does not save", "../low_bit.md"),
    "AMP309": ("Distributed", "../guides/distributed.md"),
    "AMP4": ("Autocast", "../concepts/autocast.md"),
    "AMP5": ("Bench", "../bench.md"),
    "AMP503": ("Sizes", "../align.md"),
    "AMP53": ("Difference", "../diff.md"),
    "AMP54": ("FP8", "../guides/fp8.md"),
    "AMP6": ("Watching a script run", "../run.md"),
    "AMP601": ("Why 5% zeros is a myth", "../concepts/zeros.md"),
    "AMP602": ("Why 5% zeros is a myth", "../concepts/zeros.md"),
    "AMP614": ("Distributed", "../guides/distributed.md"),
    "AMP612": ("Find a NaN", "../guides/find_a_nan.md"),
    "AMP613": ("Find a NaN", "../guides/find_a_nan.md"),
    "AMP7": ("Choose a precision", "../guides/choose_a_precision.md"),
    "AMP707": ("FP8", "../guides/fp8.md"),
    "AMP709": ("Memory", "../concepts/memory.md"),
    "AMP720": ("Why 5% zeros is a myth", "../concepts/zeros.md"),
    "AMP722": ("FP8", "../guides/fp8.md"),
    "AMP8": ("Production", "../guides/production.md"),
    "AMP9": ("Find a NaN", "../guides/find_a_nan.md"),
}


def rule_pages(rules: Sequence[Rule]) -> Pages:
    neighbours = zip([None, *rules[:-1]], rules, [*rules[1:], None], strict=True)
    pages = {f"{RULES_FOLDER}/{_file_name(rule)}": _rule_page(rule, old, new) for old, rule, new in neighbours}
    return {f"{RULES_FOLDER}/index.md": _rule_index(rules), **pages}


def _rule_index(rules: Sequence[Rule]) -> str:
    parts = [NOTICE, "# Rules", "`ampwise explain CODE` shows a rule's page in a terminal."]
    for title, group in rule_groups(rules).items():
        rows = [
            (f"[{rule.code}]({_file_name(rule)})", rule.summary, f"`{rule.name}`", _severity(rule), rule.fixable)
            for rule in group
        ]
        heading, _, more = title.rstrip(".").partition(": ")
        parts += [f"## {heading}", *([f"{more[0].upper()}{more[1:]}."] if more else []), table(INDEX_COLUMNS, rows)]
    return page(parts)


def _rule_page(rule: Rule, previous: Rule | None, following: Rule | None) -> str:
    by = ", ".join(f"`{each}`" for each in found_by(rule))
    guide = next(
        (GUIDES[start] for start in sorted(GUIDES, key=len, reverse=True) if rule.code.startswith(start)), None
    )
    silence = f"`# noqa: {rule.code}` at the end of a line accepts it there." if "`ampwise check`" in by else ""
    around = [
        f"← [{previous.code} {previous.name}]({_file_name(previous)})" if previous else "",
        "[all rules](index.md)",
        f"[{following.code} {following.name}]({_file_name(following)}) →" if following else "",
    ]
    return page(
        [
            NOTICE,
            f"# {rule.code} {rule.name}",
            f"**{plain(rule.summary)}**",
            " · ".join(
                filter(None, [_severity(rule), by and f"found by {by}", guide and "guide: [{}]({})".format(*guide)])
            ),
            *_examples(rule),
            "## Why",
            plain(rule.why),
            "## Fix",
            plain(rule.fix),
            *filter(None, [" ".join(filter(None, [FIXED_BY[rule.fixable], silence]))]),
            "---",
            " · ".join(filter(None, around)),
        ]
    )


def _file_name(rule: Rule) -> str:
    return f"{rule.code}-{rule.name}.md"


def _severity(rule: Rule) -> str:
    return str(rule.severity) if rule.on_by_default else f"{rule.severity}, off by default"


def _examples(rule: Rule) -> list[str]:
    """Return the two examples as a diff; one after the other if one of them is a command."""
    bad, good = plain(rule.bad), plain(rule.good)
    if bad.startswith("$ ") or good.startswith("$ "):
        return ["Bad:", _code(bad), "Good:", _code(good)]
    old, new = bad.splitlines(), good.splitlines()
    lines = list(difflib.unified_diff(old, new, n=len(old), lineterm=""))[3:]
    return ["```diff\n{}\n```".format("\n".join(line.rstrip() for line in lines))]


def _code(code: str) -> str:
    return f"```{'console' if code.startswith('$ ') else 'python'}\n{code}\n```"
