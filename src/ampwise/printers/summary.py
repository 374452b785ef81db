"""The order people read findings in, and the line that sums them up."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.finding import Finding, Severity
from ampwise.printers.terminal import paint

__all__ = ["in_file_order", "missed", "star", "summary"]


def in_file_order(findings: Sequence[Finding]) -> list[Finding]:
    """By file and line, as ruff does, so that one walks a file from top to bottom.

    Findings without a file come last, the worst of them first.
    """
    return sorted(findings, key=_reading_key)


def summary(findings: Sequence[Finding], colour: bool = False) -> str:
    """How many, how bad, and on a second line how many of them can be mended by machine, if any can.

    >>> summary([])
    'All checks passed!'
    """
    if not findings:
        return paint("All checks passed!", "ok", colour)
    parts = [part for severity in Severity if (part := _count(findings, severity, colour))]
    found = f"Found {len(findings)} finding{'s' if len(findings) > 1 else ''} ({', '.join(parts)})."
    return "\n".join([found, *_mendable(findings, colour)])


def missed(unread: int, partly: int) -> str:
    """What was not looked at, as a sentence without its end; empty when all was.

    >>> missed(2, 1)
    '2 paths could not be checked, 1 file only in part'
    """
    if unread:
        told = f"{unread} path{'s' if unread > 1 else ''} could not be checked"
        return f"{told}, {partly} file{'s' if partly > 1 else ''} only in part" if partly else told
    return f"{partly} file{'s were' if partly > 1 else ' was'} checked only in part" if partly else ""


def star(finding: Finding, colour: bool = False) -> str:
    """The mark, with a blank after it, of what ``--fix`` mends; edits that are not safe need more than that."""
    return f"[{paint('*', 'mended', colour)}] " if finding.edits and finding.safe else ""


def _mendable(findings: Sequence[Finding], colour: bool) -> list[str]:
    safe = sum(bool(finding.edits) and finding.safe for finding in findings)
    unsafe = sum(bool(finding.edits) and not finding.safe for finding in findings)
    more = f"{unsafe} more with `--fix --unsafe-fixes`" if safe else f"{unsafe} fixable with `--fix --unsafe-fixes`"
    if safe:
        return [f"[{paint('*', 'mended', colour)}] {safe} fixable with `--fix`{f' ({more})' if unsafe else ''}."]
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
