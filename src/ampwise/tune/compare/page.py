"""The page of ``ampwise compare``, which compares precisions: bars and tables, without a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ampwise.report.formatting import format_bytes, format_duration
from ampwise.report.page.templates import render_template
from ampwise.rules.amp5xx_speed.verdict import KIND_WORDS, ratio_text
from ampwise.tune.compare.speed_text import (
    BASES,
    clock_note,
    columns_of,
    kept_note,
    layer_note,
    problem_of,
    setup_text,
    speed_headline,
    split_of,
)
from ampwise.tune.compare.speeds import BASE, LayerTime, PrecisionRow, SpeedComparison, TimeSpread

if TYPE_CHECKING:
    from ampwise.finding import Finding

__all__ = ["precisions_page"]

STYLES = ("precisions.css",)
MOODS = {"definitely": "ok", "use": "ok", "optional": "info", "stay": "", "noise": ""}
MOST_LAYERS = 60
MEMORY = ("parameters", "gradients", "optimizer", "rest")


def precisions_page(speeds: SpeedComparison, findings: Sequence[Finding]) -> str:
    """Return the whole file."""
    return render_template("precisions.html", _view(speeds, findings), styles=STYLES)


def _view(speeds: SpeedComparison, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the variables of precisions.html."""
    best = speeds.best
    columns = columns_of(speeds)
    rules = {finding.rule.code: finding.rule for finding in findings}
    return {
        "title": speed_headline(speeds),
        "mood": MOODS.get(str(speeds.verdict(best)), "") if best is not None else "",
        "subject": speeds.subject,
        "setting": setup_text(speeds),
        "command": speeds.experiment(),
        "bars": _bars(speeds),
        "noise": _noise(speeds),
        "headings": [(column.heading, column.meaning) for column in columns],
        "rows": [_row(row, speeds) for row in speeds.rows],
        "splits": _splits(speeds),
        "memory": _memory(speeds),
        "layers": _layers(speeds),
        "findings": findings,
        "rules": [rules[code] for code in sorted(rules)],
        "bases": [(name.replace("_", " "), basis) for name, basis in BASES.items()],
        "notes": [note for note in (kept_note(speeds), clock_note(speeds), *speeds.not_measured) if note],
    }


def _widest(speeds: SpeedComparison) -> float:
    """Return the ratio at the right end of the bars."""
    return max([1.0, *(row.ratio_to_eager.high for row in speeds.rows if row.ratio_to_eager is not None)])


def _bars(speeds: SpeedComparison) -> list[dict[str, Any]]:
    """Return a bar for each row: its speed and spread, or why it has no numbers."""
    widest = _widest(speeds)
    return [
        {
            "label": row.label,
            "precision": row.precision,
            "compiled": row.compiled,
            "said": _said(row.ratio_to_eager),
            "width": _percent(row.ratio_to_eager.median / widest) if row.ratio_to_eager is not None else 0.0,
            "from": _percent(row.ratio_to_eager.low / widest) if row.ratio_to_eager is not None else 0.0,
            "to": _percent(row.ratio_to_eager.high / widest) if row.ratio_to_eager is not None else 0.0,
            "verdict": str(speeds.verdict(row) or ""),
            "problem": problem_of(row),
        }
        for row in speeds.rows
    ]


def _said(ratio: TimeSpread | None) -> str:
    return "" if ratio is None else f"{ratio_text(ratio.median)} ({ratio_text(ratio.low)}–{ratio_text(ratio.high)})"


def _noise(speeds: SpeedComparison) -> dict[str, float] | None:
    if speeds.noise is None:
        return None
    widest = _widest(speeds)
    low = max(0.0, 1 - speeds.noise)
    return {
        "share": speeds.noise,
        "one": _percent(1 / widest),
        "from": _percent(low / widest),
        "width": _percent((min(1 + speeds.noise, widest) - low) / widest),
    }


def _row(row: PrecisionRow, speeds: SpeedComparison) -> list[str]:
    return [column.cell(row, speeds) for column in columns_of(speeds)]


def _splits(speeds: SpeedComparison) -> dict[str, Any]:
    """Return a bar for each row: the time of a step, split by kind of work."""
    rows = [row for row in speeds.rows if row.split is not None and row.step_s is not None]
    longest = max((row.step_s.median for row in rows if row.step_s is not None), default=1.0)
    shares = {row.label: split_of(row) for row in rows}
    kinds = [kind for kind in KIND_WORDS if any(kind in split for split in shares.values())]
    return {
        "kinds": [(KIND_WORDS[kind], place) for place, kind in enumerate(KIND_WORDS) if kind in kinds],
        "rows": [
            {
                "label": row.label,
                "width": _percent(row.step_s.median / longest) if row.step_s is not None else 0.0,
                "said": format_duration(row.step_s.median) if row.step_s is not None else "",
                "parts": [
                    (KIND_WORDS[kind], _percent(shares[row.label].get(kind, 0.0)), place)
                    for place, kind in enumerate(KIND_WORDS)
                ],
            }
            for row in rows
        ],
    }


def _memory(speeds: SpeedComparison) -> list[dict[str, Any]]:
    largest = max((row.memory.peak for row in speeds.rows if row.memory is not None), default=1)
    shown = []
    for row in speeds.rows:
        if row.memory is not None:
            parts = [(name, getattr(row.memory, name)) for name in MEMORY]
            shown.append(
                {
                    "label": row.label,
                    "width": _percent(row.memory.peak / largest),
                    "said": format_bytes(row.memory.peak),
                    "parts": [
                        (f"{name}: {format_bytes(part)}", _percent(part / row.memory.peak), place)
                        for place, (name, part) in enumerate(parts)
                    ],
                }
            )
    return shown


def _layers(speeds: SpeedComparison) -> dict[str, Any]:
    if not speeds.layers:
        return {"labels": [], "rows": [], "left": 0, "base": BASE}
    labels = [label for label in speeds.layers[0].seconds if label != BASE]
    return {
        "labels": labels,
        "rows": [_layer(layer, labels) for layer in speeds.layers[:MOST_LAYERS]],
        "left": len(speeds.layers) - MOST_LAYERS,
        "base": BASE,
    }


def _layer(layer: LayerTime, labels: Sequence[str]) -> dict[str, Any]:
    base = layer.seconds.get(BASE)
    ratios = [(layer_note(layer, label), layer.ratio(label)) for label in labels]
    return {
        "name": layer.name,
        "kind": layer.kind,
        "times": f"×{layer.times}" if layer.times > 1 else "",
        "base": "" if base is None else format_duration(base),
        "ratios": [(text, "" if ratio is None else "better" if ratio > 1 else "worse") for text, ratio in ratios],
    }


def _percent(share: float) -> float:
    return round(100 * min(max(share, 0.0), 1.0), 2)
