"""Sort findings for reading, and summarize them in a line."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.finding import Finding, Severity
from ampwise.finding.terminal import paint

__all__ = ["describe_unchecked", "fix_mark", "in_file_order", "summary"]


def in_file_order(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings by file and line, as ruff does; those without a file come last, worst first."""
    return sorted(findings, key=_reading_key)


def summary(findings: Sequence[Finding], colour: bool = False) -> str:
    """Count findings by severity, and on a second line those that can be fixed automatically, if any.

    >>> summary([])
    'All checks passed!'
    """
    if not findings:
        return paint("All checks passed!", "ok", colour)
    parts = [part for severity in Severity if (part := _count(findings, severity, colour))]
    found = f"Found {len(findings)} finding{'s' if len(findings) > 1 else ''} ({', '.join(parts)})."
    return "\n".join([found, *_fixable(findings, colour)])


def describe_unchecked(unread: int, partly: int) -> str:
    """Describe what was not checked, as a sentence without its full stop; empty if everything was.

    >>> describe_unchecked(2, 1)
    '2 paths could not be checked, 1 file only in part'
    """
    if unread:
        paths = f"{unread} path{'s' if unread > 1 else ''} could not be checked"
        return f"{paths}, {partly} file{'s' if partly > 1 else ''} only in part" if partly else paths
    return f"{partly} file{'s were' if partly > 1 else ' was'} checked only in part" if partly else ""


def fix_mark(finding: Finding, colour: bool = False) -> str:
    """Return the mark "[*] " for a finding that ``--fix`` fixes; empty for others, also those with unsafe edits."""
    return f"[{paint('*', 'fixable', colour)}] " if finding.edits and finding.safe else ""


def _fixable(findings: Sequence[Finding], colour: bool) -> list[str]:
    safe = sum(bool(finding.edits) and finding.safe for finding in findings)
    unsafe = sum(bool(finding.edits) and not finding.safe for finding in findings)
    more = f"{unsafe} more with `--fix --unsafe-fixes`" if safe else f"{unsafe} fixable with `--fix --unsafe-fixes`"
    if safe:
        return [f"[{paint('*', 'fixable', colour)}] {safe} fixable with `--fix`{f' ({more})' if unsafe else ''}."]
    return [f"{more}."] if unsafe else []


def _reading_key(finding: Finding) -> tuple[object, ...]:
    place = finding.place
    where = (place.file is None, place.file or "", place.cell or 0, place.line or 0, place.column or 0)
    what = (
        finding.severity.rank,
        finding.rule.code,
        place.parameter or "",
        place.module or "",
        place.step or 0,
    )
    return (*where, *what, place.rank or 0, finding.message)


def _count(findings: Sequence[Finding], severity: Severity, colour: bool) -> str:
    number = sum(finding.severity is severity for finding in findings)
    plural = "s" if number > 1 and severity is not Severity.INFO else ""
    return paint(f"{number} {severity}{plural}", severity, colour) if number else ""
