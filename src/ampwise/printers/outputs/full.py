"""A paragraph a finding, for people: what, where, the source with a caret, the evidence, the way out.

Where the way out can be taken by machine, what would change follows, as lines taken away and added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.finding import Finding, Place
from ampwise.printers.excerpt import Sources, excerpt, gutter_width
from ampwise.printers.patch import patch
from ampwise.printers.summary import in_file_order, star, summary
from ampwise.printers.terminal import paint, printable

__all__ = ["render"]


def render(findings: Sequence[Finding], *, colour: bool = False, texts: Mapping[str, str] | None = None) -> str:
    sources = Sources(texts)
    paragraphs = [_paragraph(finding, sources, colour) for finding in in_file_order(findings)]
    return "\n\n".join([*paragraphs, summary(findings, colour)]) + "\n"


def _paragraph(finding: Finding, sources: Sources, colour: bool) -> str:
    rule = finding.rule
    head = paint(f"{finding.severity}[{rule.code}]", finding.severity, colour)
    name = paint(rule.name, "bold", colour)
    margin = " " * gutter_width(finding.place, sources)
    lines = [
        f"{head} {star(finding, colour)}{name}: {_block(finding.message, indent=2)}",
        *_where(finding.place, margin, colour),
        *excerpt(finding.place, sources, colour),
        *_evidence(finding, margin, colour),
        f"{paint('help', 'help', colour)}: {_block(finding.fix, indent=6)}",
        *patch(finding, sources, colour),
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
    """Six digits are what a person compares; JSON has them all."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _block(text: str, indent: int) -> str:
    """A text of several lines, the later ones indented so that none looks like the start of a finding."""
    return f"\n{'':{indent}}".join(printable(line) for line in text.split("\n"))
