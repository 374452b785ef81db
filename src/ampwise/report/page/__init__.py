"""HTML pages of a run or of a comparison: one self-contained file each, which loads and sends nothing."""

from __future__ import annotations

from typing import Any

from ampwise.report.layers import layers_of
from ampwise.report.page.charts import chart_data, curves, curves_of
from ampwise.report.page.run_view import comparison_view, markers, run_view
from ampwise.report.page.templates import GENERATOR_MARK, finalize, render_template, shared_variables, template
from ampwise.runs.reader import Run

__all__ = ["GENERATOR_MARK", "comparison_page", "difference_page", "page", "update"]

SCRIPTS = ("numbers.js", "charts.js", "heat.js", "layers.js", "page.js")


def page(run: Run, *, live: bool = False, every: float = 2.0) -> str:
    """Return the whole file. live: it polls its server for updates, every ``every`` seconds."""
    layers = layers_of(run)
    shown = run_view(run, layers)
    drawn = chart_data(run, layers) | {"markers": markers(shown["cards"])}
    return render_template("page.html", shown, drawn, scripts=SCRIPTS, live=every if live else 0)


def update(run: Run) -> dict[str, Any]:
    """Return an update for a live page: its parts as markup, and the data of its charts."""
    layers = layers_of(run)
    shown = run_view(run, layers)
    page = template("page.html")
    context = page.new_context(shown | shared_variables())
    parts = {name: "".join(block(context)) for name, block in page.blocks.items() if name not in ("main", "mark")}
    drawn = chart_data(run, layers) | {"markers": markers(shown["cards"])}
    return {"title": finalize(shown["title"]), "state": shown["state"], "parts": parts, "data": drawn}


def comparison_page(before: Run, after: Run) -> str:
    """Return the page that compares two runs, with the curves of both in the same charts."""
    drawn = curves_of([*curves(before, "before"), *curves(after, "after")]) | {"markers": []}
    return render_template("comparison.html", comparison_view(before, after), drawn, scripts=SCRIPTS)


def difference_page(shown: dict[str, Any], data: dict[str, Any]) -> str:
    """Return the page of ``ampwise diff``. shown: the variables of difference.html; data: the numbers of its charts."""
    return render_template("difference.html", shown, data, scripts=("numbers.js", "difference.js"))
