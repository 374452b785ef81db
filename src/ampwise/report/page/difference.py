"""The page of a difference: its template filled in, with a script of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

from markupsafe import Markup

from ampwise.report.page.render import LIBRARY, MARK, STYLES, _asset, _packed, _policy, _shared, _template

__all__ = ["difference_page"]

SCRIPTS = ("numbers.js", "difference.js")  # in the order in which they need each other


def difference_page(shown: dict[str, Any], data: dict[str, Any]) -> str:
    """The whole file. shown: the variables of difference.html; data: what its charts are drawn from."""
    script = _script()
    return _template("difference.html").render(
        shown | _shared(),
        mark=Markup(MARK),
        policy=_policy(script, asks=False),
        css=Markup("\n".join(_asset(style) for style in STYLES)),
        script=Markup(script),
        data=_packed(data),
        live=0,
    )


@cache
def _script() -> str:
    ours = "\n".join(_asset(name) for name in SCRIPTS)
    return f"{_asset(LIBRARY)}\n(() => {{\n'use strict';\n{ours}\n}})();\n"
