"""SARIF 2.1.0, which code-scanning dashboards read: https://docs.oasis-open.org/sarif/sarif/v2.1.0/

SARIF has no notebook cells. A finding in a notebook has its cell as a logical location, its region counts within the
cell, and its edits are only in the properties: applied to the lines of the file, they would destroy it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampwise.finding import Finding, Place, Severity
from ampwise.finding.strict_json import dumps
from ampwise.finding.version import NAME, installed_version
from ampwise.report.printers.fingerprint import fingerprints, project_path, unread_fingerprint
from ampwise.report.printers.rule_page import rule_page
from ampwise.report.printers.unread import NAME as NOT_CHECKED
from ampwise.report.printers.unread import Unread, message_of, place_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def render(
    findings: Sequence[Finding],
    *,
    colour: bool = False,
    texts: Mapping[str, str] | None = None,
    unread: Sequence[Unread] = (),
) -> str:
    rules = sorted({finding.rule.code: finding.rule for finding in findings}.values(), key=lambda rule: rule.code)
    index = {rule.code: number for number, rule in enumerate(rules)}
    marked = zip(findings, fingerprints(findings), strict=True)
    described: list[dict[str, Any]] = [
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.summary},
            "fullDescription": {"text": rule.why},
            "help": {"text": rule.fix},
            "helpUri": rule_page(rule),
            "defaultConfiguration": {"level": LEVELS[rule.severity], "enabled": rule.on_by_default},
        }
        for rule in rules
    ]
    if unread:
        text = "A file could not be checked"
        described.append({"id": NOT_CHECKED, "name": NOT_CHECKED, "shortDescription": {"text": text}})
    driver = {"name": NAME, "version": installed_version(), "rules": [_known(rule) for rule in described]}
    run = {
        "tool": {"driver": _known(driver)},
        "columnKind": "unicodeCodePoints",
        "results": [
            *[_result(finding, index[finding.rule.code], mark) for finding, mark in marked],
            *[_unread_result(each, len(rules)) for each in unread],
        ],
    }
    return dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _result(finding: Finding, rule_index: int, fingerprint: str) -> dict[str, Any]:
    location, file = _location(finding.place), finding.place.file
    properties: dict[str, Any] = {"fix": finding.fix, "evidence": finding.evidence, "place": finding.place.as_dict()}
    fixes = None
    if any(edit.cell is not None for edit in finding.edits):
        properties |= {"edits": [edit.as_dict() for edit in finding.edits], "safe": finding.safe}
    elif file is not None and finding.edits:
        replacements = [
            {
                "deletedRegion": {
                    "startLine": edit.line,
                    "startColumn": edit.column,
                    "endLine": edit.end_line,
                    "endColumn": edit.end_column,
                },
                "insertedContent": {"text": edit.content},
            }
            for edit in finding.edits
        ]
        change = {"artifactLocation": _artifact(file), "replacements": replacements}
        safety = {"applicability": "safe" if finding.safe else "unsafe"}
        fixes = [{"description": {"text": finding.fix}, "artifactChanges": [change], "properties": safety}]
    return _known(
        {
            "ruleId": finding.rule.code,
            "ruleIndex": rule_index,
            "level": LEVELS[finding.severity],
            "message": {"text": finding.message or finding.rule.summary},
            "locations": [location] if location else [],
            "relatedLocations": _related(finding) or None,
            "partialFingerprints": {"ampwise/v1": fingerprint},
            "fixes": fixes,
            "properties": properties,
        }
    )


def _related(finding: Finding) -> list[dict[str, Any]]:
    """Return the other places that the evidence names, such as the loop that calls a helper."""
    found = []
    for name, value in finding.evidence.items():
        file, line = (value.get("file"), value.get("line")) if isinstance(value, dict) else (None, None)
        if isinstance(file, str) and isinstance(line, int) and line > 0:
            found.append({**_location(Place(file=file, line=line)), "message": {"text": name}})
    return found


def _unread_result(unread: Unread, rule_index: int) -> dict[str, Any]:
    return {
        "ruleId": NOT_CHECKED,
        "ruleIndex": rule_index,
        "level": "error",
        "message": {"text": message_of(unread)},
        "locations": [_location(place_of(unread))],
        "partialFingerprints": {"ampwise/v1": unread_fingerprint(unread.path)},
    }


def _location(place: Place) -> dict[str, Any]:
    """Return the place in a file, and the parts of a model, machine or notebook: a gradient has a name and no line."""
    region = {
        "startLine": place.line,
        "startColumn": place.column,
        "endLine": place.end_line,
        "endColumn": place.end_column,
    }
    physical = None
    if place.file is not None:
        known_region = None if place.line is None else _known(region)
        physical = _known({"artifactLocation": _artifact(place.file), "region": known_region})
    cell = None if place.cell is None else f"cell {place.cell}"
    named = {"cell": cell, "parameter": place.parameter, "module": place.module, "resource": place.device}
    logical = [
        {"name": name.rpartition(".")[2] or name, "fullyQualifiedName": name, "kind": kind}
        for kind, name in named.items()
        if name
    ]
    return _known({"physicalLocation": physical, "logicalLocations": logical or None})


def _artifact(file: str) -> dict[str, str]:
    from pathlib import PurePath
    from urllib.parse import quote

    path = project_path(file)
    is_outside = PurePath(path).is_absolute()  # of the checkout
    rooted = path if path.startswith("/") or not is_outside else f"/{path}"  # /C:/ on Windows
    try:
        quoted = quote(rooted, errors="surrogateescape")  # the exact bytes of a name that is not UTF-8
    except UnicodeEncodeError:  # half a surrogate pair, which only Windows allows in a name
        quoted = quote(rooted, errors="backslashreplace")
    return {"uri": f"file://{quoted}"} if is_outside else {"uri": quoted, "uriBaseId": "%SRCROOT%"}


def _known(properties: dict[str, Any]) -> dict[str, Any]:
    """Drop unknown properties: SARIF has no nulls."""
    return {name: value for name, value in properties.items() if value is not None}
