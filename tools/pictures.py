"""docs/images: pictures of published results, drawn from benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.figure import Line, Panel, drawn
from tools.markdown import Pages

__all__ = ["pictures"]


def pictures(root: Path) -> Pages:
    """Return the pictures of the results that are there, as SVG."""
    draw = {"sizes": (_sizes, "sizes_gpu.json"), "equal_loss": (_equal_loss, "equal_loss_gpu_curves.json")}
    files = {name: root / "benchmarks" / "results" / file for name, (_, file) in draw.items()}
    return {f"docs/images/{name}.svg": draw[name][0](_rows(file)) for name, file in files.items() if file.is_file()}


def _rows(file: Path) -> list[dict[str, Any]]:
    result = json.loads(file.read_text(encoding="utf-8"))
    return [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]


def _sizes(rows: list[dict[str, Any]]) -> str:
    names = {"tf32": "TF32", "bf16": "BF16", "bf16 compiled": "BF16 compiled", "fp8 compiled": "FP8 compiled"}
    across = [(1.0, "1 M"), (10.0, "10 M"), (100.0, "100 M"), (1000.0, "1 B"), (4000.0, "")]
    up = [(0.4, ""), *((value, f"{value:g}×") for value in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0))]
    panels = []
    for tokens in (1024.0, 8192.0):
        of = [row for row in rows if row["tokens a step"] == tokens]
        lines = [Line("FP32", [(1.0, 1.0), (4000.0, 1.0)], dashed=True)]
        for column, name in names.items():
            lines.append(Line(name, [(row["M parameters"], row[column]) for row in of if row[column] != "-"]))
        panels.append(Panel(f"{tokens:,.0f} tokens a step", lines, across, "parameters", up))
    return drawn("Times as fast as FP32, by the size of a GPT, on an H200", panels)


def _equal_loss(rows: list[dict[str, Any]]) -> str:
    labels = [column.removesuffix(" loss") for column in rows[0] if column.endswith(" loss")]
    lines = [
        Line(label, [(float(row[f"{label} s"]), float(row[f"{label} loss"])) for row in rows[1:]]) for label in labels
    ]
    seconds = max(across for line in lines for across, _ in line.points)
    losses = [loss for line in lines for _, loss in line.points]
    across = _places(0.0, seconds, " s")
    return drawn(
        "Held-back loss over time, on an H200",
        [
            Panel("Held-back loss", lines, across, "time of training", _places(min(losses), max(losses)),
                  log_across=False, log_up=False)
        ],
    )  # fmt: skip


def _places(low: float, high: float, unit: str = "") -> list[tuple[float, str]]:
    """Return about five round places from below the low end of an axis to above its high end.

    >>> _places(0.0, 8.5, " s")
    [(0, '0 s'), (2, '2 s'), (4, '4 s'), (6, '6 s'), (8, '8 s'), (10, '10 s')]
    """
    step = next(
        step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if (high - low) / step <= 6
    )
    first, last = int(low // step), int(-(-high // step))
    return [(round(place * step, 6), f"{place * step:g}{unit}") for place in range(first, last + 1)]
