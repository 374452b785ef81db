"""Count findings per rule, the most frequent first, as ``ruff check --statistics`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.terminal import paint
from ampwise.report.printers.summary import summary

__all__ = ["render_statistics"]

NO_STATISTICS = ("gitlab", "sarif")  # formats that cannot contain counts


def render_statistics(findings: Sequence[Finding], output_format: str, colour: bool = False) -> str:
    """Return one line per rule, or a JSON array.

    A star marks a rule whose findings ``--fix`` can all fix; a dash marks one of which it can fix some.
    """
    if output_format in NO_STATISTICS:
        raise BadInput(f"--statistics does not support {output_format}. Use --output-format concise or json.")
    counts = _counts(findings)
    if output_format == "json":
        from ampwise.finding.strict_json import dumps

        return dumps(counts)
    return "\n".join([*_lines(counts, colour), summary(findings, colour)]) + "\n"


def _counts(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for finding in findings:
        rule = finding.rule
        blank = {"code": rule.code, "name": rule.name, "severity": str(rule.severity), "count": 0}
        row = rows.setdefault(rule.code, {**blank, "fixable": False, "fixable_count": 0})
        row["count"] += 1
        row["fixable_count"] += bool(finding.edits) and finding.safe
        row["fixable"] = row["fixable_count"] > 0
    return sorted(rows.values(), key=lambda row: (-row["count"], row["code"]))


def _lines(counts: Sequence[dict[str, Any]], colour: bool) -> list[str]:
    if not counts:
        return []
    width = len(str(counts[0]["count"]))
    code_width = max(len(row["code"]) for row in counts)
    is_any_fixable = any(row["fixable"] for row in counts)
    lines = []
    for row in counts:
        number = paint(f"{row['count']:>{width}}", "bold", colour)
        code = paint(f"{row['code']:{code_width}}", row["severity"], colour)
        mark = f"[{paint(_mark(row), 'fixable', colour)}] " if is_any_fixable else ""
        lines.append(f"{number}  {code}  {mark}{row['name']}")
    return lines


def _mark(row: dict[str, Any]) -> str:
    if not row["fixable"]:
        return " "
    return "*" if row["fixable_count"] == row["count"] else "-"
