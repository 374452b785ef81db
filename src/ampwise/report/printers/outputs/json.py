"""A JSON array of objects in ruff's format, with severity, evidence and place added.

``location`` and ``end_location`` are null if there is no line, ``column`` if there is no column; NaN and infinities are
strings (see ``strict_json``). ``fix`` is always present, for its message; its ``applicability`` is "safe" or "unsafe",
or "display", ruff's word for a fix that is shown and never applied, and so has no edits. In a notebook ``cell`` counts
all cells from 1, and rows count within the cell, also those of edits.

What was not checked comes last: objects whose ``code`` is null, as in ruff for messages without a rule, and whose
``message`` says why. Their ``severity`` is "error" for a file that was not checked at all, such as one with a syntax
error, and "note" for code within a file, for example because of a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampwise.finding import Finding
from ampwise.finding.strict_json import dumps
from ampwise.report.printers.rule_page import rule_page
from ampwise.report.printers.unread import Unread, message_of, place_of

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
    unread: Sequence[Unread] = (),
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
                "url": rule_page(finding.rule),
                "evidence": finding.evidence,
                "place": place.as_dict(),
            }
        )
    for each in unread:
        where = {"location": _location(each.line, None), "place": place_of(each).as_dict()}
        objects.append({**NOTE, "severity": "error", "message": message_of(each), "filename": each.path, **where})
    objects += [{**NOTE, "message": note, "filename": note.partition(":")[0] or None} for note in notes]
    return dumps(objects)


def _location(row: int | None, column: int | None) -> dict[str, int | None] | None:
    return None if row is None else {"row": row, "column": column}
