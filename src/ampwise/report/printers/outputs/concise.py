"""One line per finding: ``train.py:12:5: AMP101 [*] [error] clip-scaled-grads: message``.

The star marks findings that ``--fix`` fixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.finding import Finding
from ampwise.finding.terminal import paint, printable
from ampwise.report.printers.summary import fix_mark, in_file_order, summary


def render(findings: Sequence[Finding], *, colour: bool = False, texts: Mapping[str, str] | None = None) -> str:
    lines = []
    for finding in in_file_order(findings):
        place = paint(printable(str(finding.place)), "bold", colour)
        code = paint(finding.rule.code, finding.severity, colour)
        mark = f"{fix_mark(finding, colour)}[{finding.severity.word}]"
        lines.append(f"{place}: {code} {mark} {finding.rule.name}: {printable(finding.message)}")
    return "\n".join([*lines, summary(findings, colour)]) + "\n"
