"""A comparison of two runs as HTML for a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding.html import badge, bold, box, code, headline, paragraph, table, text
from ampwise.report.comparison.comparison_text import MOST_FINDINGS, MOST_LAYERS, STYLES, TITLES, how_often, sentence
from ampwise.report.formatting import format_percent
from ampwise.report.notebook import counted_finding_html

if TYPE_CHECKING:
    from ampwise.report.comparison.comparison import Comparison
    from ampwise.report.comparison.findings import ComparedFinding
    from ampwise.report.comparison.layers import ComparedLayer
    from ampwise.report.comparison.numbers import ComparedNumber

__all__ = ["comparison_html"]

COLUMNS = ("", "before", "after", "")


def comparison_html(compared: Comparison) -> str:
    """Return the verdict, the findings by status, differences in setup, and the numbers."""
    head = paragraph(f"{badge('comparison', compared.mood)} {bold(sentence(compared.verdict))}")
    names = paragraph(f"before {code(compared.before)}, after {code(compared.after)}")
    notes = "".join(paragraph(text(note), soft=True) for note in compared.notes)
    parts = [box(head + names + notes, compared.mood), *[_findings(compared, status) for status in TITLES]]
    if compared.setup:
        rows = [[text(one.what), _or_unknown(one.before), _or_unknown(one.after)] for one in compared.setup]
        parts += [_title("Differences in setup"), table(("", "before", "after"), rows, left=3)]
    if compared.numbers:
        caution = paragraph(text(compared.caution), soft=True)
        parts += [_title("Numbers"), table(COLUMNS, map(_number, compared.numbers)), caution]
    changed = [layer for layer in compared.layers if layer.changed]
    if changed:
        rows = [_layer(layer) for layer in changed[:MOST_LAYERS]]
        parts += [_title("Layers that changed the most"), table(("layer", "lost in FP16", "norm"), rows, left=3)]
    return "".join(parts)


def _title(words: str) -> str:
    return paragraph(bold(words))


def _findings(compared: Comparison, status: str) -> str:
    found = [one for one in compared.findings if one.status == status]
    if not found:
        return ""
    title = TITLES[status][0]
    cards = "".join(map(_card, found[:MOST_FINDINGS]))
    more = len(found) - MOST_FINDINGS
    return _title(f"{title} ({len(found):,})") + cards + (paragraph(f"… and {more:,} more") if more > 0 else "")


def _card(one: ComparedFinding) -> str:
    finding = one.seen.finding
    if one.status != "gone":
        return counted_finding_html(one.seen, frequency=how_often(one))
    # It needs no fix any more: a line is enough.
    return box(paragraph(f"{headline(finding)} {code(finding.place) if finding.place.as_dict() else ''}"), "ok")


def _number(one: ComparedNumber) -> list[str]:
    style = STYLES.get(one.judged)
    change = badge(one.change, style) if style else text(one.change)
    name = f'<span title="{text(one.meaning)}">{text(one.name)}</span>'
    return [name, text(one.written(one.before)), text(one.written(one.after)), change]


def _layer(layer: ComparedLayer) -> list[str]:
    lost = [None if share is None else format_percent(share) for share in (layer.lost_before, layer.lost_after)]
    shares = " → ".join(share or "–" for share in lost) if any(lost) else ""
    return [code(layer.name), text(shares), text(f"{layer.norm_before:.3g} → {layer.norm_after:.3g}")]


def _or_unknown(value: str | None) -> str:
    return text("unknown") if value is None else code(value)
