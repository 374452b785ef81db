"""One paragraph per finding, for people: message, place, source with carets, evidence and fix.

If the fix can be applied automatically, the removed and added lines follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.finding import Finding, Place
from ampwise.finding.terminal import paint, printable
from ampwise.report.printers.edit_preview import preview_edits
from ampwise.report.printers.excerpt import SourceFiles, excerpt, gutter_width
from ampwise.report.printers.summary import fix_mark, in_file_order, summary

__all__ = ["render"]


def render(findings: Sequence[Finding], *, colour: bool = False, texts: Mapping[str, str] | None = None) -> str:
    sources = SourceFiles(texts)
    paragraphs = [_paragraph(finding, sources, colour) for finding in in_file_order(findings)]
    return "\n\n".join([*paragraphs, summary(findings, colour)]) + "\n"


def _paragraph(finding: Finding, sources: SourceFiles, colour: bool) -> str:
    rule = finding.rule
    head = paint(f"{finding.severity}[{rule.code}]", finding.severity, colour)
    name = paint(rule.name, "bold", colour)
    margin = " " * gutter_width(finding.place, sources)
    lines = [
        f"{head} {fix_mark(finding, colour)}{name}: {_block(finding.message, indent=2)}",
        *_where(finding.place, margin, colour),
        *excerpt(finding.place, sources, colour),
        *_evidence(finding, margin, colour),
        f"{paint('help', 'help', colour)}: {_block(finding.fix, indent=6)}",
        *preview_edits(finding, sources, colour),
    ]
    return "\n".join(lines)


def _where(place: Place, margin: str, colour: bool) -> list[str]:
    if place == Place():
        return []
    return [f"{margin}{paint('-->', 'gutter', colour)} {printable(str(place))}"]


def _evidence(finding: Finding, margin: str, colour: bool) -> list[str]:
    mark = f"{margin} {paint('=', 'gutter', colour)}"
    shown = finding.shown_evidence.items()
    return [f"{mark} {printable(str(key))}: {printable(_value(value))}" for key, value in shown]


def _value(value: object) -> str:
    """Return a value with six digits, enough to compare; JSON has all of them."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _block(text: str, indent: int) -> str:
    """Return a text of several lines, indented after the first so that no line looks like the start of a finding."""
    return f"\n{'':{indent}}".join(printable(line) for line in text.split("\n"))
