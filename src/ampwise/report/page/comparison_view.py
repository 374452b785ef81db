"""The template variables and the chart data of a page that compares two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampwise.report.comparison.comparison import Comparison
from ampwise.report.comparison.comparison_text import TITLES, how_often, sentence
from ampwise.report.formatting import format_percent
from ampwise.report.page.chart_data import curves, curves_of
from ampwise.report.page.run_view import finding_card, rules_of

if TYPE_CHECKING:
    from ampwise.report.comparison.findings import ComparedFinding
    from ampwise.report.comparison.layers import ComparedLayer
    from ampwise.runs.reader import Run

__all__ = ["comparison_chart_data", "comparison_view"]

MOST_FINDINGS = 100  # of each kind
MOST_LAYERS = 40


def comparison_view(before: Run, after: Run) -> dict[str, Any]:
    """Return the variables of comparison.html."""
    compared = Comparison.of(before, after)
    groups = [_group(compared.findings, status, before, after) for status in TITLES]
    changed = [layer for layer in compared.layers if layer.changed]
    return {
        "title": sentence(compared.verdict),
        "mood": compared.mood,
        "names": [("before", compared.before), ("after", compared.after)],
        "notes": compared.notes,
        "caution": compared.caution,
        "numbers": [_number(one) for one in compared.numbers],
        "groups": [group for group in groups if group["cards"]],
        "rules": rules_of(card for group in groups for card, _ in group["cards"]),
        "setup": [(one.what, one.before or "unknown", one.after or "unknown") for one in compared.setup],
        "layers": [_layer(layer) for layer in changed[:MOST_LAYERS]],
        "layers_left": len(changed) - MOST_LAYERS,
        "only": [
            (which, names)
            for which, names in (("before", compared.only_before), ("after", compared.only_after))
            if names
        ],
    }


def comparison_chart_data(before: Run, after: Run) -> dict[str, Any]:
    """Return the curves of both runs, to be drawn in the same charts."""
    return curves_of([*curves(before, "before"), *curves(after, "after")])


def _group(findings: tuple[ComparedFinding, ...], status: str, before: Run, after: Run) -> dict[str, Any]:
    found = [one for one in findings if one.status == status]
    shown = found[:MOST_FINDINGS]
    # Each card shows paths relative to its own run's folder.
    made = [
        finding_card(one.seen, before if one.after is None else after, f"{status}-{number}")
        for number, one in enumerate(shown, 1)
    ]
    return {
        "title": f"{TITLES[status][0]} ({len(found):,})",
        "status": status,
        "cards": [(each, how_often(one)) for each, one in zip(made, shown, strict=True)],
        "left": len(found) - MOST_FINDINGS,
    }


def _number(one: Any) -> dict[str, str]:
    return {
        "name": one.name,
        "meaning": one.meaning,
        "before": one.written(one.before),
        "after": one.written(one.after),
        "change": one.change,
        "judged": one.judged if one.judged in ("better", "worse") else "",
    }


def _layer(layer: ComparedLayer) -> list[str]:
    lost = ["" if share is None else format_percent(share) for share in (layer.lost_before, layer.lost_after)]
    return [layer.name, *lost, f"{layer.norm_before:.3g}", f"{layer.norm_after:.3g}"]
