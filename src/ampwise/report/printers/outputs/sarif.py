"""SARIF 2.1.0, which code-scanning dashboards read: https://docs.oasis-open.org/sarif/sarif/v2.1.0/

SARIF has no notebook cells. A finding in a notebook has its cell as a logical location, its region counts within the
cell, and its edits are only in the properties: applied to the lines of the file, they would destroy it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampwise.finding import Edit, Finding, Place, Rule, Severity
from ampwise.finding.strict_json import dumps
from ampwise.finding.version import NAME, installed_version
from ampwise.report.printers.fingerprint import fingerprints, project_path

__all__ = ["render"]

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def render(findings: Sequence[Finding], *, colour: bool = False, texts: Mapping[str, str] | None = None) -> str:
    rules = sorted({finding.rule.code: finding.rule for finding in findings}.values(), key=lambda rule: rule.code)
    index = {rule.code: number for number, rule in enumerate(rules)}
    marked = zip(findings, fingerprints(findings), strict=True)
    run = {
        "tool": {"driver": _driver(rules)},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, index[finding.rule.code], mark) for finding, mark in marked],
    }
    return dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _driver(rules: Sequence[Rule]) -> dict[str, Any]:
    return _known({"name": NAME, "version": installed_version(), "rules": [_rule(rule) for rule in rules]})


def _rule(rule: Rule) -> dict[str, Any]:
    return _known(
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.summary},
            "fullDescription": {"text": rule.why},
            "help": {"text": rule.fix},
            "helpUri": rule.url,
            "defaultConfiguration": {"level": LEVELS[rule.severity], "enabled": rule.on_by_default},
        }
    )


def _result(finding: Finding, rule_index: int, fingerprint: str) -> dict[str, Any]:
    location = _location(finding.place)
    return _known(
        {
            "ruleId": finding.rule.code,
            "ruleIndex": rule_index,
            "level": LEVELS[finding.severity],
            "message": {"text": finding.message or finding.rule.summary},
            "locations": [location] if location else [],
            "partialFingerprints": {"ampwise/v1": fingerprint},
            "fixes": _fixes(finding),
            "properties": _properties(finding),
        }
    )


def _fixes(finding: Finding) -> list[dict[str, Any]] | None:
    file = finding.place.file
    if file is None or not finding.edits or _is_in_cells(finding):
        return None
    change = {"artifactLocation": _artifact(file), "replacements": [_replacement(edit) for edit in finding.edits]}
    safety = {"applicability": "safe" if finding.safe else "unsafe"}
    return [{"description": {"text": finding.fix}, "artifactChanges": [change], "properties": safety}]


def _replacement(edit: Edit) -> dict[str, Any]:
    region = {
        "startLine": edit.line,
        "startColumn": edit.column,
        "endLine": edit.end_line,
        "endColumn": edit.end_column,
    }
    return {"deletedRegion": region, "insertedContent": {"text": edit.content}}


def _properties(finding: Finding) -> dict[str, Any]:
    properties: dict[str, Any] = {"fix": finding.fix, "evidence": finding.evidence, "place": finding.place.as_dict()}
    if _is_in_cells(finding):
        properties |= {"edits": [edit.as_dict() for edit in finding.edits], "safe": finding.safe}
    return properties


def _is_in_cells(finding: Finding) -> bool:
    return any(edit.cell is not None for edit in finding.edits)


def _location(place: Place) -> dict[str, Any]:
    return _known({"physicalLocation": _physical(place), "logicalLocations": _logical(place)})


def _physical(place: Place) -> dict[str, Any] | None:
    if place.file is None:
        return None
    return _known({"artifactLocation": _artifact(place.file), "region": _region(place)})


def _artifact(file: str) -> dict[str, str]:
    from pathlib import PurePath

    path = project_path(file)
    if PurePath(path).is_absolute():  # outside the checkout
        return {"uri": "file://" + _quoted(path if path.startswith("/") else f"/{path}")}  # /C:/ on Windows
    return {"uri": _quoted(path), "uriBaseId": "%SRCROOT%"}


def _quoted(path: str) -> str:
    from urllib.parse import quote

    try:
        return quote(path, errors="surrogateescape")  # the exact bytes of a name that is not UTF-8
    except UnicodeEncodeError:  # half a surrogate pair, which only Windows allows in a name
        return quote(path, errors="backslashreplace")


def _region(place: Place) -> dict[str, Any] | None:
    if place.line is None:
        return None
    return _known(
        {
            "startLine": place.line,
            "startColumn": place.column,
            "endLine": place.end_line,
            "endColumn": place.end_column,
        }
    )


def _logical(place: Place) -> list[dict[str, str]] | None:
    """Return the parts of a model, machine or notebook that a finding is about; a gradient has a name and no line."""
    cell = None if place.cell is None else f"cell {place.cell}"
    named = {"cell": cell, "parameter": place.parameter, "module": place.module, "resource": place.device}
    return [
        {"name": name.rpartition(".")[2] or name, "fullyQualifiedName": name, "kind": kind}
        for kind, name in named.items()
        if name
    ] or None


def _known(properties: dict[str, Any]) -> dict[str, Any]:
    """Drop unknown properties: SARIF has no nulls."""
    return {name: value for name, value in properties.items() if value is not None}
