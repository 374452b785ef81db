"""Runs and comparisons as HTML for a notebook: the verdict, the findings and the numbers."""

from __future__ import annotations

from ampwise.finding.html import badge, bold, box, code, finding_html, headline, paragraph, prose, table, text
from ampwise.report.comparison.comparison import Comparison
from ampwise.report.comparison.comparison_text import MOST_FINDINGS, MOST_LAYERS, STYLES, TITLES, how_often, sentence
from ampwise.report.formatting import evidence_line, format_percent
from ampwise.report.impact import impact_of
from ampwise.report.source_lines import recorded_lines
from ampwise.report.verdict import event_lines, occurrence, opening, run_mood, worst_first
from ampwise.runs.reader import Run as Run  # ampwise.Run comes from here, with the view that is set below
from ampwise.runs.rows import CountedFinding

MOST_EVENTS = 5


def run_html(run: Run) -> str:
    """Return the findings, worst first, and how the run ended, in compact form."""
    first, *others = opening(run)
    findings = worst_first(run.merged_findings())
    more = len(findings) - MOST_FINDINGS
    head = paragraph(f"{badge('ampwise', run_mood(run))} <b>{prose(first)}</b>")
    return (
        box(head + "".join(paragraph(prose(one), soft=True) for one in others), run_mood(run))
        + "".join(counted_finding_html(one, impact=impact_of(one, run)) for one in findings[:MOST_FINDINGS])
        + (paragraph(text(f"… and {more:,} more findings")) if more > 0 else "")
        + "".join(paragraph(prose(one), soft=True) for one in event_lines(run, MOST_EVENTS))
        + "".join(paragraph(text(one), soft=True) for one in run.trouble)
    )


def counted_finding_html(counted: CountedFinding, *, frequency: str = "", impact: str = "") -> str:
    """Return a finding with its impact, its recorded source lines, its evidence, and how often it occurred."""
    cost = f"Impact: {impact}" if impact else ""
    details = (cost, evidence_line(counted.finding.shown_evidence), frequency or occurrence(counted))
    return finding_html(counted.finding, lines=recorded_lines(counted), details=details)


def comparison_html(compared: Comparison) -> str:
    """Return the verdict, the findings by status, differences in setup, and the numbers."""
    head = paragraph(f"{badge('comparison', compared.mood)} {bold(sentence(compared.verdict))}")
    names = paragraph(f"before {code(compared.before)}, after {code(compared.after)}")
    notes = "".join(paragraph(text(note), soft=True) for note in compared.notes)
    parts = [box(head + names + notes, compared.mood)]
    for status, (title, _) in TITLES.items():
        found = [one for one in compared.findings if one.status == status]
        if found:
            parts.append(_title(f"{title} ({len(found):,})"))
            for matched in found[:MOST_FINDINGS]:
                finding = matched.seen.finding
                if status == "gone":  # it needs no fix any more: a line is enough
                    place = code(finding.place) if finding.place.as_dict() else ""
                    parts.append(box(paragraph(f"{headline(finding)} {place}"), "ok"))
                else:
                    parts.append(counted_finding_html(matched.seen, frequency=how_often(matched)))
            more = len(found) - MOST_FINDINGS
            parts += [paragraph(f"… and {more:,} more")] if more > 0 else []
    if compared.setup:
        rows = [
            [text(one.what), *(text("unknown") if value is None else code(value) for value in (one.before, one.after))]
            for one in compared.setup
        ]
        parts += [_title("Differences in setup"), table(("", "before", "after"), rows, left=3)]
    if compared.numbers:
        rows = []
        for one in compared.numbers:
            style = STYLES.get(one.judged)
            change = badge(one.change, style) if style else text(one.change)
            name = f'<span title="{text(one.meaning)}">{text(one.name)}</span>'
            rows.append([name, text(one.written(one.before)), text(one.written(one.after)), change])
        caution = paragraph(text(compared.caution), soft=True)
        parts += [_title("Numbers"), table(("", "before", "after", ""), rows), caution]
    changed = [layer for layer in compared.layers if layer.changed]
    if changed:
        rows = []
        for layer in changed[:MOST_LAYERS]:
            lost = [None if share is None else format_percent(share) for share in (layer.lost_before, layer.lost_after)]
            shares = " → ".join(share or "–" for share in lost) if any(lost) else ""
            rows.append([code(layer.name), text(shares), text(f"{layer.norm_before:.3g} → {layer.norm_after:.3g}")])
        parts += [_title("Layers that changed the most"), table(("layer", "lost in FP16", "norm"), rows, left=3)]
    return "".join(parts)


def _title(words: str) -> str:
    return paragraph(bold(words))


Run._notebook_view = run_html
