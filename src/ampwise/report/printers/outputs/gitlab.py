"""GitLab's Code Quality report.

https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format
It requires a path and a line, so a finding without a file has the text of its place and line 1, and one in a notebook
names the cell in its description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampwise.finding import Finding, Place, Severity
from ampwise.finding.strict_json import dumps
from ampwise.report.printers.fingerprint import cell_position, fingerprints, project_path

__all__ = ["render"]

SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "major", Severity.INFO: "info"}


def render(findings: Sequence[Finding], *, colour: bool = False, texts: Mapping[str, str] | None = None) -> str:
    prints = fingerprints(findings)
    return dumps([_issue(finding, mark) for finding, mark in zip(findings, prints, strict=True)])


def _issue(finding: Finding, fingerprint: str) -> dict[str, Any]:
    place = finding.place
    cell = "" if place.cell is None else f"{cell_position(place)}: "
    return {
        "description": f"{finding.rule.code}: {cell}{finding.message}",
        "check_name": finding.rule.name,
        "fingerprint": fingerprint,
        "severity": SEVERITIES[finding.severity],
        "location": {
            "path": project_path(place.file) if place.file else str(place),
            "lines": _lines(place),
        },
    }


def _lines(place: Place) -> dict[str, int]:
    if place.cell is not None:  # lines of a cell are not lines of the file
        return {"begin": 1, "end": 1}
    return {"begin": place.line or 1, "end": place.end_line or place.line or 1}
