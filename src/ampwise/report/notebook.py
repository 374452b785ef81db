"""A run as HTML for a notebook: the verdict and the findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding.html import badge, box, finding_html, paragraph, prose, text
from ampwise.report.event_log import event_lines
from ampwise.report.formatting import evidence_line
from ampwise.report.source_lines import recorded_lines
from ampwise.report.verdict import occurrence, opening, run_mood, worst_first
from ampwise.runs.reader import Run

if TYPE_CHECKING:
    from ampwise.runs.rows import CountedFinding

__all__ = ["Run", "counted_finding_html", "run_html"]

MOST_FINDINGS = 20
MOST_EVENTS = 5


def run_html(run: Run) -> str:
    """Return the findings, worst first, and how the run ended, in compact form."""
    first, *others = opening(run)
    findings = worst_first(run.merged_findings())
    more = len(findings) - MOST_FINDINGS
    head = paragraph(f"{badge('ampwise', run_mood(run))} <b>{prose(first)}</b>")
    return (
        box(head + "".join(paragraph(prose(one), soft=True) for one in others), run_mood(run))
        + "".join(counted_finding_html(one) for one in findings[:MOST_FINDINGS])
        + (paragraph(text(f"… and {more:,} more findings")) if more > 0 else "")
        + "".join(paragraph(prose(one), soft=True) for one in event_lines(run, MOST_EVENTS))
        + "".join(paragraph(text(one), soft=True) for one in run.trouble)
    )


def counted_finding_html(counted: CountedFinding, *, frequency: str = "") -> str:
    """Return a finding with its recorded source lines, its evidence, and its ``frequency`` (by default: how often)."""
    details = (evidence_line(counted.finding.shown_evidence), frequency or occurrence(counted))
    return finding_html(counted.finding, lines=recorded_lines(counted), details=details)


Run._notebook_view = run_html
