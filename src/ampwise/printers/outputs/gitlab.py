"""GitLab's Code Quality report.

https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format
A path and a line are obligatory there, so a finding without a file carries the text of its place and line 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampwise.finding import Finding, Severity
from ampwise.printers.identity import fingerprints, project_path
from ampwise.printers.strict_json import dumps

__all__ = ["render"]

SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "major", Severity.INFO: "info"}


def render(findings: Sequence[Finding], *, colour: bool = False) -> str:
    prints = fingerprints(findings)
    return dumps([_issue(finding, mark) for finding, mark in zip(findings, prints, strict=True)])


def _issue(finding: Finding, fingerprint: str) -> dict[str, Any]:
    place = finding.place
    return {
        "description": f"{finding.rule.code}: {finding.message}",
        "check_name": finding.rule.name,
        "fingerprint": fingerprint,
        "severity": SEVERITIES[finding.severity],
        "location": {
            "path": project_path(place.file) if place.file else str(place),
            "lines": {"begin": place.line or 1, "end": place.end_line or place.line or 1},
        },
    }
