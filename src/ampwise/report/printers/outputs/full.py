"""One paragraph per finding, for people: message, place, source with carets, evidence and fix.

If the fix can be applied automatically, the removed and added lines follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.finding import Finding
from ampwise.report.printers.edit_preview import preview_edits
from ampwise.report.printers.summary import fix_mark, in_file_order, summary
from ampwise.report.source_lines import SourceFiles, excerpt, gutter_width
from ampwise.report.text_layout import finding_paragraph

__all__ = ["render"]


def render(findings: Sequence[Finding], *, colour: bool = False, texts: Mapping[str, str] | None = None) -> str:
    sources = SourceFiles(texts)
    paragraphs = []
    for finding in in_file_order(findings):
        # Six digits are enough to compare; JSON has all of them.
        details = [
            f"{key}: {f'{value:.6g}' if isinstance(value, float) else value}"
            for key, value in finding.shown_evidence.items()
        ]
        source, margin = excerpt(finding.place, sources, colour), gutter_width(finding.place, sources)
        mark = fix_mark(finding, colour)
        text = finding_paragraph(finding, source, details, margin=margin, colour=colour, mark=mark)
        paragraphs.append("\n".join([text, *preview_edits(finding, sources, colour)]))
    return "\n\n".join([*paragraphs, summary(findings, colour)]) + "\n"
