"""The page of ``ampwise diff``."""

from __future__ import annotations

from typing import Any

from ampwise.report.page.templates import render_template

__all__ = ["difference_page"]

SCRIPTS = ("numbers.js", "difference.js")


def difference_page(shown: dict[str, Any], data: dict[str, Any]) -> str:
    """Return the whole file. shown: the variables of difference.html; data: the numbers of its charts."""
    return render_template("difference.html", shown, data, scripts=SCRIPTS)
