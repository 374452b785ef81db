"""A JSON array of objects in ruff's format, with severity, evidence and place added.

``location`` and ``end_location`` are null if there is no line, ``column`` if there is no column; NaN and infinities are
strings (see ``strict_json``). ``fix`` is always present, for its message; its ``applicability`` is "safe" or "unsafe",
or "display", ruff's word for a fix that is shown and never applied, and so has no edits. In a notebook ``cell`` counts
all cells from 1, and rows count within the cell, also those of edits.

Notes on what was not checked, for example because of a limit, come last: one object each, whose ``code`` is null, as
in ruff for messages without a rule, whose ``severity`` is "note", and whose ``message`` says where and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampwise.finding import Finding
from ampwise.finding.strict_json import dumps

NOTE: dict[str, Any] = {
    "code": None,
    "name": None,
    "severity": "note",
    "message": "",
    "filename": None,
    "cell": None,
    "location": None,
    "end_location": None,
    "noqa_row": None,
    "fix": None,
    "url": None,
    "evidence": {},
    "place": {},
}


def render(
    findings: Sequence[Finding],
    *,
    colour: bool = False,
    texts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    objects: list[dict[str, Any]] = []
    for finding in findings:
        place = finding.place
        edits = [
            {"content": edit.content, "location": _location(*edit.start), "end_location": _location(*edit.end)}
            | ({} if edit.cell is None else {"cell": edit.cell})
            for edit in finding.edits
        ]
        applicability = "display" if not edits else "safe" if finding.safe else "unsafe"
        objects.append(
            {
                "code": finding.rule.code,
                "name": finding.rule.name,
                "severity": str(finding.severity),
                "message": finding.message,
                "filename": place.file,
                "cell": place.cell,
                "location": _location(place.line, place.column),
                "end_location": _location(place.end_line, place.end_column),
                "noqa_row": place.line,
                "fix": {"applicability": applicability, "message": finding.fix, "edits": edits},
                "url": finding.rule.url,
                "evidence": finding.evidence,
                "place": place.as_dict(),
            }
        )
    objects += [{**NOTE, "message": note, "filename": note.partition(":")[0] or None} for note in notes]
    return dumps(objects)


def _location(row: int | None, column: int | None) -> dict[str, int | None] | None:
    return None if row is None else {"row": row, "column": column}
