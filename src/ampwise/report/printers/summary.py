"""Sort and count findings: the summary line, and the counts per rule of ``--statistics``."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.errors import BadInput
from ampwise.finding import Finding, Severity
from ampwise.finding.terminal import paint, printable

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

NO_STATISTICS = ("gitlab", "sarif")  # formats that cannot contain counts


def in_file_order(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings by file and line, as ruff does; those without a file come last, worst first."""

    def key(finding: Finding) -> tuple[object, ...]:
        place = finding.place
        where = (place.file is None, place.file or "", place.cell or 0, place.line or 0, place.column or 0)
        what = (finding.severity.rank, finding.rule.code, place.parameter or "", place.module or "", place.step or 0)
        return (*where, *what, place.rank or 0, finding.message)

    return sorted(findings, key=key)


def fix_mark(finding: Finding, colour: bool = False) -> str:
    """Return the mark "[*] " for a finding that ``--fix`` fixes; empty for others, also those with unsafe edits."""
    return f"[{paint('*', 'fixable', colour)}] " if finding.edits and finding.safe else ""


def summary(findings: Sequence[Finding], colour: bool = False) -> str:
    """Count findings by severity, and on a second line those that can be fixed automatically, if any.

    >>> summary([])
    'All checks passed!'
    """
    if not findings:
        return paint("All checks passed!", "ok", colour)
    parts = []
    for severity in Severity:
        number = sum(finding.severity is severity for finding in findings)
        plural = "s" if number > 1 else ""
        parts += [paint(f"{number} {severity.word}{plural}", severity, colour)] if number else []
    text = f"Found {len(findings)} finding{'s' if len(findings) > 1 else ''} ({', '.join(parts)})."
    safe = sum(bool(finding.edits) and finding.safe for finding in findings)
    unsafe = sum(bool(finding.edits) and not finding.safe for finding in findings)
    files = {finding.place.file for finding in findings if finding.edits and finding.place.file is not None}
    only = ""
    if len(files) == 1:
        import shlex

        only = f" {printable(shlex.quote(files.pop()))}"
    if safe:
        more = f" ({unsafe} more with `--unsafe-fixes`)" if unsafe else ""
        text += f"\n[{paint('*', 'fixable', colour)}] {safe} fixable with `ampwise check --fix{only}`{more}."
    elif unsafe:
        text += f"\n{unsafe} fixable with `ampwise check --fix --unsafe-fixes{only}`."
    return text


def describe_unchecked(unread: int, partly: int) -> str:
    """Describe what was not checked, as a sentence without its full stop; empty if everything was.

    >>> describe_unchecked(2, 1)
    '2 paths could not be checked, 1 file only in part'
    """
    if unread:
        paths = f"{unread} path{'s' if unread > 1 else ''} could not be checked"
        return f"{paths}, {partly} file{'s' if partly > 1 else ''} only in part" if partly else paths
    return f"{partly} file{'s were' if partly > 1 else ' was'} checked only in part" if partly else ""


def render_statistics(findings: Sequence[Finding], output_format: str, colour: bool = False) -> str:
    """Return one line per rule, the most frequent first, or a JSON array, as ``ruff check --statistics`` does.

    A star marks a rule whose findings ``--fix`` can all fix; a dash marks one of which it can fix some.
    """
    if output_format in NO_STATISTICS:
        raise BadInput(f"--statistics does not support {output_format}. Use --output-format concise or json.")
    rows: dict[str, dict[str, Any]] = {}
    for finding in findings:
        rule = finding.rule
        blank = {"code": rule.code, "name": rule.name, "severity": str(rule.severity), "count": 0}
        row = rows.setdefault(rule.code, {**blank, "fixable": False, "fixable_count": 0})
        row["count"] += 1
        row["fixable_count"] += bool(finding.edits) and finding.safe
        row["fixable"] = row["fixable_count"] > 0
    counts = sorted(rows.values(), key=lambda row: (-row["count"], row["code"]))
    if output_format == "json":
        from ampwise.finding.strict_json import dumps

        return dumps(counts)
    width = max((len(str(row["count"])) for row in counts), default=0)
    code_width = max((len(row["code"]) for row in counts), default=0)
    is_any_fixable = any(row["fixable"] for row in counts)
    lines = []
    for row in counts:
        number = paint(f"{row['count']:>{width}}", "bold", colour)
        code = paint(f"{row['code']:{code_width}}", row["severity"], colour)
        star = " " if not row["fixable"] else "*" if row["fixable_count"] == row["count"] else "-"
        mark = f"[{paint(star, 'fixable', colour)}] " if is_any_fixable else ""
        lines.append(f"{number}  {code}  {mark}{row['name']}")
    return "\n".join([*lines, summary(findings, colour)]) + "\n"
