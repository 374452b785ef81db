"""A run as a notebook shows it: the verdict, and what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.printers.html import badge, box, finding_html, paragraph, prose, text
from ampwise.report.source_lines import kept_lines
from ampwise.report.verdict import happened, mood, opening, worst_first
from ampwise.report.wording import one_line

if TYPE_CHECKING:
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen

__all__ = ["run_html", "seen_html"]

MOST_FINDINGS = 20


def run_html(run: Run) -> str:
    """What was found, worst first, and how the run ended; compact, for under a cell."""
    first, *others = opening(run)
    seen = worst_first(run.merged_findings())
    more = len(seen) - MOST_FINDINGS
    head = paragraph(f"{badge('ampwise', mood(run))} <b>{prose(first)}</b>")
    return (
        box(head + "".join(paragraph(prose(one), soft=True) for one in others), mood(run))
        + "".join(seen_html(one) for one in seen[:MOST_FINDINGS])
        + (paragraph(text(f"… and {more:,} more findings")) if more > 0 else "")
        + "".join(paragraph(text(one), soft=True) for one in run.trouble)
    )


def seen_html(seen: Seen, *, told: str = "") -> str:
    """A finding with the lines that the record keeps, its evidence, and how often it was seen (or ``told``)."""
    facts = (one_line(seen.finding.shown_evidence), told or happened(seen))
    return finding_html(seen.finding, lines=kept_lines(seen), told=facts)
