"""Render the page of a run or of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampwise.report.layers import layers_of
from ampwise.report.page.chart_data import chart_data
from ampwise.report.page.comparison_view import comparison_chart_data, comparison_view
from ampwise.report.page.markup import finalize
from ampwise.report.page.run_view import run_view
from ampwise.report.page.templates import render_template, shared_variables, template

if TYPE_CHECKING:
    from ampwise.runs.reader import Run

__all__ = ["comparison_page", "page", "update"]

SCRIPTS = ("numbers.js", "charts.js", "heat.js", "layers.js", "page.js")


def page(run: Run, *, live: bool = False, every: float = 2.0) -> str:
    """Return the whole file. live: it polls its server for updates, every ``every`` seconds."""
    layers = layers_of(run)
    shown, drawn = run_view(run, layers), chart_data(run, layers)
    return render_template("page.html", shown, drawn, scripts=SCRIPTS, live=every if live else 0)


def comparison_page(before: Run, after: Run) -> str:
    """Return the page that compares two runs."""
    shown, drawn = comparison_view(before, after), comparison_chart_data(before, after)
    return render_template("comparison.html", shown, drawn, scripts=SCRIPTS)


def update(run: Run) -> dict[str, Any]:
    """Return an update for a live page: its parts as markup, and the data of its charts."""
    layers = layers_of(run)
    shown = run_view(run, layers)
    page = template("page.html")
    context = page.new_context(shown | shared_variables())
    parts = {name: "".join(block(context)) for name, block in page.blocks.items() if name != "main"}
    return {"title": finalize(shown["title"]), "parts": parts, "data": chart_data(run, layers)}
