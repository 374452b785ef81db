"""Show a comparison in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding.html import badge, bold, box, code, finding_html, paragraph, table, text
from ampwise.tune.compare.speed_text import columns_of, layer_note, speed_headline
from ampwise.tune.compare.speeds import BASE

if TYPE_CHECKING:
    from ampwise.tune.compare.result import PrecisionComparison
    from ampwise.tune.compare.speeds import PrecisionRow, SpeedComparison

__all__ = ["comparison_html"]

MOODS = {"definitely": "ok", "use": "ok", "optional": "info", "stay": "", "noise": "", "None": ""}
MOST_LAYERS = 12


def comparison_html(result: PrecisionComparison) -> str:
    """Render the verdict, the table, the layers and the findings."""
    speeds, best = result.speeds, result.best
    mood = MOODS[str(speeds.verdict(best) if best is not None else None)]
    head = paragraph(f"{badge('precisions', mood)} {bold(speed_headline(speeds))}")
    where = paragraph(f"{code(speeds.subject)} on {text(speeds.device_name)}", soft=True)
    columns = columns_of(speeds)
    rows = [[_cell(row, speeds, column.cell(row, speeds)) for column in columns] for row in speeds.rows]
    parts = [box(head + where, mood), table([column.heading for column in columns], rows), _layers(speeds)]
    notes = paragraph("<br>".join(map(text, speeds.not_measured)), soft=True)
    return "".join([*parts, *map(finding_html, result.findings), notes])


def _cell(row: PrecisionRow, speeds: SpeedComparison, words: str) -> str:
    verdict = speeds.verdict(row)
    return badge(words, MOODS[str(verdict)]) if verdict is not None and words == str(verdict) else text(words)


def _layers(speeds: SpeedComparison) -> str:
    if not speeds.layers:
        return ""
    labels = [label for label in speeds.layers[0].seconds if label != BASE]
    rows = [
        [code(layer.name), text(layer.kind), text(f"×{layer.times}"), *(text(layer_note(layer, one)) for one in labels)]
        for layer in speeds.layers[:MOST_LAYERS]
    ]
    return table(["layers", "class", "", *labels], rows, left=2)
