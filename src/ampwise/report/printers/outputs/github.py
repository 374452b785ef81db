"""GitHub workflow commands: GitHub shows each finding next to its line.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.finding import Finding, Place, Severity
from ampwise.finding.terminal import printable
from ampwise.report.printers.fingerprint import cell_position, project_path
from ampwise.report.printers.summary import in_file_order

__all__ = ["render"]

COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}

# The runner decodes these and no others; an unescaped newline would end the command and start the next.
DATA_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
PROPERTY_ESCAPES = {**DATA_ESCAPES, ":": "%3A", ",": "%2C"}


def render(findings: Sequence[Finding], *, colour: bool = False, texts: Mapping[str, str] | None = None) -> str:
    return "".join(f"{_command(finding)}\n" for finding in in_file_order(findings))


def _command(finding: Finding) -> str:
    properties = {"title": f"{finding.rule.code} {finding.rule.name}", **_position(finding.place)}
    listed = ",".join(f"{key}={_escaped(value, PROPERTY_ESCAPES)}" for key, value in properties.items())
    return f"::{COMMANDS[finding.severity]} {listed}::{_escaped(_message(finding), DATA_ESCAPES)}"


def _message(finding: Finding) -> str:
    return f"{_where(finding.place)}{finding.message}\nhelp: {finding.fix}"


def _where(place: Place) -> str:
    """Return the place as text where a file position cannot express it."""
    if place.cell is not None:
        return f"{cell_position(place)}: "
    return "" if place.file or place == Place() else f"{place}: "


def _position(place: Place) -> dict[str, str]:
    if place.file is not None and place.cell is not None:
        # A line of a cell is not a line of the file, and GitHub would mark the wrong one.
        return {"file": project_path(place.file), "line": "1"}
    known: dict[str, object] = {
        "file": None if place.file is None else project_path(place.file),
        "line": place.line,
        "endLine": place.end_line,
    }
    # GitHub accepts columns only for a span within one line.
    if place.end_line in (None, place.line):
        known |= {"col": place.column, "endColumn": place.end_column}
    return {key: str(value) for key, value in known.items() if value is not None}


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(char) or printable(char) for char in text)
