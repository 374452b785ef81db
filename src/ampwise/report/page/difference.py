"""The page of a difference."""

from __future__ import annotations

from typing import Any

from ampwise.report.page.templates import filled

__all__ = ["difference_page"]

SCRIPTS = ("numbers.js", "difference.js")


def difference_page(shown: dict[str, Any], data: dict[str, Any]) -> str:
    """The whole file. shown: the variables of difference.html; data: what its charts are drawn from."""
    return filled("difference.html", shown, data, scripts=SCRIPTS)
