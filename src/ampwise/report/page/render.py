"""A run, or two beside each other, as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampwise.report.layers import layers_of
from ampwise.report.page.compared import comparison_payload, comparison_view
from ampwise.report.page.markup import finalize
from ampwise.report.page.payload import payload
from ampwise.report.page.templates import filled, shared, template
from ampwise.report.page.view import view

if TYPE_CHECKING:
    from ampwise.record.reader import Run

__all__ = ["comparison_page", "page", "update"]

SCRIPTS = ("numbers.js", "charts.js", "heat.js", "layers.js", "page.js")


def page(run: Run, *, live: bool = False, every: float = 2.0) -> str:
    """The whole file. live: it asks the server that it came from for what is new, every so many seconds."""
    layers = layers_of(run)
    shown, drawn = view(run, layers), payload(run, layers)
    return filled("page.html", shown, drawn, scripts=SCRIPTS, live=every if live else 0)


def comparison_page(before: Run, after: Run) -> str:
    """Two runs beside each other."""
    shown, drawn = comparison_view(before, after), comparison_payload(before, after)
    return filled("comparison.html", shown, drawn, scripts=SCRIPTS)


def update(run: Run) -> dict[str, Any]:
    """What a live page takes in: the parts that are text, as markup, and the numbers that its charts are drawn from."""
    layers = layers_of(run)
    shown = view(run, layers)
    page = template("page.html")
    context = page.new_context(shown | shared())
    parts = {name: "".join(block(context)) for name, block in page.blocks.items() if name != "main"}
    return {"title": finalize(shown["title"]), "parts": parts, "data": payload(run, layers)}
