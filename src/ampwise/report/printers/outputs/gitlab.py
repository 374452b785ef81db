"""GitLab's Code Quality report.

https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format
It requires a path and a line, so a finding without a file has the text of its place and line 1, and one in a notebook
names the cell in its description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.finding import Finding, Severity
from ampwise.finding.strict_json import dumps
from ampwise.report.printers.fingerprint import cell_position, fingerprints, project_path, unread_fingerprint
from ampwise.report.printers.unread import NAME, Unread, message_of

SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "major", Severity.INFO: "info"}


def render(
    findings: Sequence[Finding],
    *,
    colour: bool = False,
    texts: Mapping[str, str] | None = None,
    unread: Sequence[Unread] = (),
) -> str:
    issues = []
    for finding, fingerprint in zip(findings, fingerprints(findings), strict=True):
        place = finding.place
        cell, lines = "", {"begin": place.line or 1, "end": place.end_line or place.line or 1}
        if place.cell is not None:  # lines of a cell are not lines of the file
            cell, lines = f"{cell_position(place)}: ", {"begin": 1, "end": 1}
        issue = {
            "description": f"{finding.rule.code}: {cell}{finding.message}",
            "check_name": finding.rule.name,
            "fingerprint": fingerprint,
            "severity": SEVERITIES[finding.severity],
            "location": {"path": project_path(place.file) if place.file else str(place), "lines": lines},
        }
        issues.append(issue)
    issues += [
        {
            "description": message_of(each),
            "check_name": NAME,
            "fingerprint": unread_fingerprint(each.path),
            "severity": SEVERITIES[Severity.ERROR],
            "location": {"path": project_path(each.path), "lines": {"begin": each.line or 1, "end": each.line or 1}},
        }
        for each in unread
    ]
    return dumps(issues)
