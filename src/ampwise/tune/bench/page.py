"""The page of ``ampwise bench``, which compares precisions: bars and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ampwise.report.formatting import format_bytes, format_duration
from ampwise.report.page.run_view import finding_card, rules_of, severity_chips
from ampwise.report.page.templates import render_template
from ampwise.runs.rows import CountedFinding
from ampwise.tune.bench.result import (
    BASES,
    MEANINGS,
    MOODS,
    layer_note,
    notes_of,
    problem_of,
    setup_text,
    speed_headline,
    speed_table,
    split_of,
)
from ampwise.tune.bench.speeds import BASE, SpeedComparison
from ampwise.tune.bench.verdict import KIND_WORDS, ratio_text

if TYPE_CHECKING:
    from ampwise.finding import Finding

MOST_LAYERS = 60
MEMORY = ("parameters", "gradients", "optimizer", "rest")


def precisions_page(speeds: SpeedComparison, findings: Sequence[Finding]) -> str:
    """Return the whole file."""
    best = speeds.best
    headings, rows = speed_table(speeds)
    cards = []
    for number, finding in enumerate(findings, 1):
        # The experiment is the command to try; the page shows it with a button, not among the evidence.
        experiment = str(finding.evidence.get("experiment") or "")
        rest = {name: value for name, value in finding.evidence.items() if name != "experiment"}
        card = finding_card(CountedFinding(finding=finding.but(evidence=rest)), f"finding-{number}")
        cards.append(replace(card, command=experiment, example=[]))
    labels = [label for label in speeds.layers[0].seconds if label != BASE] if speeds.layers else []
    headline, lead = speed_headline(speeds), "A whole training step: forward, backward, clip, optimizer."
    if best is not None:  # the noise and what torch.compile adds come below the title
        headline, _, compiled = headline.partition("; ")
        headline, _, noise = headline.partition(" (")
        headline = headline.replace("definitely ", "use ", 1)
        parts = [noise.removesuffix(")"), f"fastest compiled: {compiled}" if compiled else ""]
        said = "; ".join(part for part in parts if part)
        lead = f"{said[0].upper()}{said[1:]}. {lead}" if said else lead
    headline = f"{headline[0].upper()}{headline[1:]}"
    sections = {
        "speed": ("Speed", speeds.rows),
        "numbers": ("Numbers", rows),
        "findings": ("Reasons and warnings", cards),
        "time": ("Time", any(row.split and row.step_s for row in speeds.rows)),
        "memory": ("Memory", any(row.memory for row in speeds.rows)),
        "layers": ("Layers", speeds.layers),
        "basis": ("How it was measured", True),
        "rules": ("Rules", cards),
    }
    view = {
        "title": f"{headline} · {speeds.name}",
        "headline": headline,
        "lead": lead,
        "chips": severity_chips(cards),
        "nav": [(name, title) for name, (title, found) in sections.items() if found],
        "mood": MOODS.get(str(speeds.verdict(best)), "") if best is not None else "",
        "name": speeds.name,
        "setting": setup_text(speeds),
        "command": speeds.experiment(),
        **_bars(speeds),
        "headings": [(heading, MEANINGS[heading]) for heading in headings],
        "rows": rows,
        "splits": _splits(speeds),
        "memory": _memory(speeds),
        "layers": {
            "labels": labels,
            "rows": _layers(speeds, labels),
            "left": max(0, len(speeds.layers) - MOST_LAYERS),
            "base": BASE,
        },
        "cards": cards,
        "rules": rules_of(cards),
        "bases": [(name.replace("_", " "), basis) for name, basis in BASES.items()],
        "notes": notes_of(speeds),
    }
    return render_template("precisions.html", view, styles=("precisions.css",))


def _bars(speeds: SpeedComparison) -> dict[str, Any]:
    """Return a bar for each row, its speed and spread, or why it has no numbers; and the band of noise around 1."""
    widest = max([1.0, *(row.ratio_to_eager.high for row in speeds.rows if row.ratio_to_eager is not None)])
    bars = []
    for row in speeds.rows:
        bar = {
            "label": row.label,
            "precision": row.precision,
            "compiled": row.compiled,
            "said": "",
            "range": "",
            "width": 0.0,
            "from": 0.0,
            "to": 0.0,
            "verdict": str(speeds.verdict(row) or ""),
            "problem": problem_of(row),
        }
        ratio = row.ratio_to_eager
        if ratio is not None:
            bar["said"] = ratio_text(ratio.median)
            bar["range"] = "" if row.label == BASE else f" ({ratio_text(ratio.low)}–{ratio_text(ratio.high)})"
            bar["width"], bar["from"], bar["to"] = (
                _percent(each / widest) for each in (ratio.median, ratio.low, ratio.high)
            )
        bars.append(bar)
    noise = None
    if speeds.noise is not None:
        low = max(0.0, 1 - speeds.noise)
        noise = {
            "share": speeds.noise,
            "one": _percent(1 / widest),
            "from": _percent(low / widest),
            "width": _percent((min(1 + speeds.noise, widest) - low) / widest),
        }
    return {"bars": bars, "noise": noise}


def _splits(speeds: SpeedComparison) -> dict[str, Any]:
    """Return a bar for each row: the time of a step, split by kind of work."""
    rows = [(row.label, row.step_s.median, split_of(row)) for row in speeds.rows if row.split and row.step_s]
    longest = max((seconds for _, seconds, _ in rows), default=1.0)
    kinds = {kind for _, _, split in rows for kind in split}
    return {
        "kinds": [(word, place) for place, (kind, word) in enumerate(KIND_WORDS.items()) if kind in kinds],
        "rows": [
            {
                "label": label,
                "width": _percent(seconds / longest),
                "said": format_duration(seconds),
                "parts": [
                    (word, _percent(split.get(kind, 0.0)), place)
                    for place, (kind, word) in enumerate(KIND_WORDS.items())
                ],
            }
            for label, seconds, split in rows
        ],
    }


def _memory(speeds: SpeedComparison) -> list[dict[str, Any]]:
    rows = [(row.label, row.memory) for row in speeds.rows if row.memory is not None]
    largest = max((memory.peak for _, memory in rows), default=1)
    return [
        {
            "label": label,
            "width": _percent(memory.peak / largest),
            "said": format_bytes(memory.peak),
            "parts": [
                (f"{name}: {format_bytes(getattr(memory, name))}", _percent(getattr(memory, name) / memory.peak), place)
                for place, name in enumerate(MEMORY)
            ],
        }
        for label, memory in rows
    ]


def _layers(speeds: SpeedComparison, labels: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for layer in speeds.layers[:MOST_LAYERS]:
        base = layer.seconds.get(BASE)
        ratios = [(layer_note(layer, label), layer.ratio(label)) for label in labels]
        row = {
            "name": layer.name,
            "kind": layer.kind,
            "times": f"×{layer.times}" if layer.times > 1 else "",
            "base": "" if base is None else format_duration(base),
            "ratios": [(text, "" if ratio is None else "better" if ratio > 1 else "worse") for text, ratio in ratios],
        }
        rows.append(row)
    return rows


def _percent(share: float) -> float:
    return round(100 * min(max(share, 0.0), 1.0), 2)
