"""The templates filled in, with the styles, the script and the data all in one file."""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ampwise.report.layers import layers_of
from ampwise.report.page.compared import comparison_payload, comparison_view
from ampwise.report.page.markup import FILTERS, finalize
from ampwise.report.page.payload import payload
from ampwise.report.page.view import view
from ampwise.strict_json import dumps

if TYPE_CHECKING:
    from jinja2 import Template

    from ampwise.record.reader import Run

__all__ = ["MARK", "comparison_page", "page", "update"]

MARK = '<meta name="generator" content="ampwise report">'  # by which an earlier page of ours is known
STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = ("numbers.js", "charts.js", "heat.js", "layers.js", "page.js")  # in the order in which they need each other
LIBRARY = "vendor/uPlot.iife.min.js"


def page(run: Run, *, live: bool = False, every: float = 2.0) -> str:
    """The whole file. live: it asks the server that it came from for what is new, every so many seconds."""
    layers = layers_of(run)
    return _filled("page.html", view(run, layers), payload(run, layers), live=every if live else 0)


def comparison_page(before: Run, after: Run) -> str:
    """Two runs beside each other."""
    return _filled("comparison.html", comparison_view(before, after), comparison_payload(before, after))


def update(run: Run) -> dict[str, Any]:
    """What a live page takes in: the parts that are text, as markup, and the numbers that its charts are drawn from."""
    layers = layers_of(run)
    shown = view(run, layers)
    template = _template("page.html")
    context = template.new_context(shown | _shared())
    parts = {name: "".join(block(context)) for name, block in template.blocks.items() if name != "main"}
    return {"title": finalize(shown["title"]), "parts": parts, "data": payload(run, layers)}


def _filled(name: str, shown: dict[str, Any], data: dict[str, Any], *, live: float = 0) -> str:
    script = _script()
    return _template(name).render(
        shown | _shared(),
        mark=Markup(MARK),
        policy=_policy(script, asks=bool(live)),
        css=Markup("\n".join(_asset(style) for style in STYLES)),
        script=Markup(script),
        data=_packed(data),
        live=live,
    )


def _shared() -> dict[str, Any]:
    """What every template may use."""
    return {"parts": _template("parts.html").module}


def _policy(script: str, *, asks: bool) -> str:
    """The page runs our script and no other, and fetches nothing, whatever a record has smuggled in."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "style-src 'unsafe-inline'"]
    return "; ".join([*allowed, f"script-src 'sha256-{digest}'", *(["connect-src 'self'"] if asks else [])])


def _packed(data: dict[str, Any]) -> str:
    """A fifth of the size; every browser unpacks it by itself. The same data always gives the same text."""
    return base64.b64encode(gzip.compress(dumps(data, indent=None).encode(), mtime=0)).decode()


@cache
def _script() -> str:
    ours = "\n".join(_asset(name) for name in SCRIPTS)
    return f"{_asset(LIBRARY)}\n(() => {{\n'use strict';\n{ours}\n}})();\n"


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("ampwise.report", "page"),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    return environment.get_template(name)
