"""An array of objects shaped as ruff's, with severity, evidence and place added.

``location`` and ``end_location`` are null where there is no line, ``column`` where there is no column; NaN
and infinities are strings (see ``strict_json``). ``fix.applicability`` is "display", ruff's word for a fix
that is shown and never applied, and so has no edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampwise.finding import Finding
from ampwise.printers.strict_json import dumps

__all__ = ["render"]


def render(findings: Sequence[Finding], *, colour: bool = False) -> str:
    return dumps([_object(finding) for finding in findings])


def _object(finding: Finding) -> dict[str, Any]:
    place = finding.place
    return {
        "code": finding.rule.code,
        "name": finding.rule.name,
        "severity": str(finding.severity),
        "message": finding.message,
        "filename": place.file,
        "location": _location(place.line, place.column),
        "end_location": _location(place.end_line, place.end_column),
        "fix": {"applicability": "display", "message": finding.fix, "edits": []},
        "url": finding.rule.url,
        "evidence": finding.evidence,
        "place": place.as_dict(),
    }


def _location(row: int | None, column: int | None) -> dict[str, int | None] | None:
    return None if row is None else {"row": row, "column": column}
