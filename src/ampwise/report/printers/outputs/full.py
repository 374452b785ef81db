"""One paragraph per finding, for people: message, place, source line with carets, evidence and fix.

``--diff`` shows what a fix would change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.finding import Finding
from ampwise.report.printers.summary import fix_mark, in_file_order, summary
from ampwise.report.source_lines import SourceFiles, excerpt
from ampwise.report.text_layout import finding_paragraph, path_from_here


def render(
    findings: Sequence[Finding],
    *,
    colour: bool = False,
    texts: Mapping[str, str] | None = None,
    width: int | None = None,
) -> str:
    """Return the paragraphs, wrapped to ``width``; None leaves lines as long as they are."""
    sources = SourceFiles(texts)
    paragraphs = []
    for finding in in_file_order(findings):
        place = finding.place
        # Six digits are enough to compare; JSON has all of them.
        details = [
            f"{key}: {f'{value:.6g}' if isinstance(value, float) else value}"
            for key, value in finding.shown_evidence.items()
        ]
        paragraphs.append(
            finding_paragraph(
                finding,
                where=str(place.but(file=place.file and path_from_here(place.file))) if place.as_dict() else "",
                source=excerpt(finding.place, sources, colour, width),
                details=details,
                colour=colour,
                mark=fix_mark(finding, colour),
                width=width,
            )
        )
    return "\n\n".join([*paragraphs, summary(findings, colour)]) + "\n"
