"""One line a finding: ``train.py:12:5: AMP101 [error] clip-scaled-grads: message``."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.finding import Finding
from ampwise.printers.summary import in_file_order, summary
from ampwise.printers.terminal import paint, printable

__all__ = ["render"]


def render(findings: Sequence[Finding], *, colour: bool = False) -> str:
    lines = [_line(finding, colour) for finding in in_file_order(findings)]
    return "\n".join([*lines, summary(findings, colour)]) + "\n"


def _line(finding: Finding, colour: bool) -> str:
    place = paint(printable(str(finding.place)), "bold", colour)
    code = paint(finding.rule.code, finding.severity, colour)
    return f"{place}: {code} [{finding.severity}] {finding.rule.name}: {printable(finding.message)}"
