"""GitHub workflow commands: GitHub shows each finding next to its line.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.finding import Finding, Place, Severity
from ampwise.finding.terminal import printable
from ampwise.report.printers.fingerprint import cell_position, project_path
from ampwise.report.printers.summary import in_file_order
from ampwise.report.printers.unread import NAME, Unread, message_of

COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}

# The runner decodes these and no others; an unescaped newline would end the command and start the next.
DATA_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
PROPERTY_ESCAPES = {**DATA_ESCAPES, ":": "%3A", ",": "%2C"}


def render(
    findings: Sequence[Finding],
    *,
    colour: bool = False,
    texts: Mapping[str, str] | None = None,
    unread: Sequence[Unread] = (),
) -> str:
    lines = []
    for finding in in_file_order(findings):
        place = finding.place
        where = ""  # the place as text, where a file position cannot express it
        known: dict[str, object] = {"title": f"{finding.rule.code} {finding.rule.name}"}
        if place.file is not None:
            known["file"] = project_path(place.file)
        if place.cell is not None:
            where = f"{cell_position(place)}: "
            # A line of a cell is not a line of the file, and GitHub would mark the wrong one.
            known["line"] = 1
        else:
            where = "" if place.file or place == Place() else f"{place}: "
            known |= {"line": place.line, "endLine": place.end_line}
            if place.end_line in (None, place.line):  # GitHub accepts columns only for a span within one line
                known |= {"col": place.column, "endColumn": place.end_column}
        lines.append(_command(COMMANDS[finding.severity], known, f"{where}{finding.message}\nhelp: {finding.fix}"))
    for each in unread:
        at: dict[str, object] = {"title": NAME, "file": project_path(each.path), "line": each.line}
        lines.append(_command("error", at, message_of(each)))
    return "".join(lines)


def _command(name: str, known: Mapping[str, object], message: str) -> str:
    properties = ",".join(
        f"{key}={_escaped(str(value), PROPERTY_ESCAPES)}" for key, value in known.items() if value is not None
    )
    return f"::{name} {properties}::{_escaped(message, DATA_ESCAPES)}\n"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(char) or printable(char) for char in text)
