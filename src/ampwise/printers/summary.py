"""The order people read findings in, and the line that sums them up."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.finding import Finding, Severity
from ampwise.printers.terminal import paint

__all__ = ["in_file_order", "summary"]


def in_file_order(findings: Sequence[Finding]) -> list[Finding]:
    """By file and line, as ruff does, so that one walks a file from top to bottom.

    Findings without a file come last, the worst of them first.
    """
    return sorted(findings, key=_reading_key)


def summary(findings: Sequence[Finding], colour: bool = False) -> str:
    """One line: how many, and how bad.

    >>> summary([])
    'All checks passed!'
    """
    if not findings:
        return paint("All checks passed!", "ok", colour)
    parts = [part for severity in Severity if (part := _count(findings, severity, colour))]
    return f"Found {len(findings)} finding{'s' if len(findings) > 1 else ''} ({', '.join(parts)})."


def _reading_key(finding: Finding) -> tuple[object, ...]:
    place = finding.place
    where = (place.file is None, place.file or "", place.line or 0, place.column or 0)
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
